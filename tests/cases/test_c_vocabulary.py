"""Cases c: vocabulary, pad token, padding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.adapters import base_folder, engine_config, method
from tests.cases.rows import chat, write
from tests.fixtures.data.tokenizers import bpe_tokenizer
from tests.harness import run_ranks
from tests.tiny import tiny_folder, tiny_tokenizer
from zft.api import Engine
from zft.commands.preview import preview
from zft.compose import compose
from zft.config import AdamW, EngineConfig, ZftError
from zft.data import prepare
from zft.data.collate import packed, padded
from zft.dist import World
from zft.execute import execute
from zft.models.adapters import attach_adapter
from zft.models.load import (
    HubWeights,
    build_model,
    check_tokens,
    embedding_rows,
    grow,
    load_config,
    load_tokenizer,
    tokenizer_rows,
)  # fmt: skip
from zft.train.evaluate import evaluate_model
from zft.train.setup import run_tokenizer, structure

# 16: pad = eos


@pytest.mark.parametrize(
    ("ids", "pad_id"), [([5, 6, 2], 2), ([2, 5, 2], 2), ([5, 6, 0], 0), ([5, 0, 0, 2], 0)], ids=str
)
@pytest.mark.parametrize("packing", [False, True])
def test_16_pad_that_is_eos_stays_a_target(ids, pad_id, packing):
    """Labels follow length and mask, never the token id: the EOS of a row is learned though padding has the same id."""
    long = (np.full(6, 7), np.ones(6, bool))
    short = (np.asarray(ids), np.ones(len(ids), bool))
    batch = packed([[short], [long]], pad_id, flat=False) if packing else padded([short, long], pad_id)
    assert batch["input_ids"][0].tolist() == ids + [pad_id] * (6 - len(ids))
    assert batch["labels"][0].tolist() == ids + [-100] * (6 - len(ids))
    if not packing:
        assert batch["attention_mask"][0].tolist() == [1] * len(ids) + [0] * (6 - len(ids))


@pytest.mark.parametrize("style", ["chatml", "llama3", "phi"])
def test_16_pad_that_is_eos_in_a_data_set(tmp_path, style):
    """With a tokenizer whose pad token is its EOS every row still ends with a supervised end of turn, padding is masked."""
    tokenizer = bpe_tokenizer(style)
    tokenizer.pad_token = tokenizer.eos_token
    path = write(tmp_path / "a.jsonl", [chat(), chat(answer="of and to in is")])
    [batch] = prepare(path, tokenizer, seq_len=64).loader(0, 1, 2, 1, 1).next_step()
    lengths, ends = batch["attention_mask"].sum(-1).tolist(), set()
    for row, length in enumerate(lengths):
        targets = batch["labels"][row][:length][batch["labels"][row][:length] != -100]
        ends.add(tokenizer.decode(targets[-1:]))
        assert (batch["labels"][row][length:] == -100).all() and len(targets) > 1
    assert len(set(lengths)) == 2 and ends == {tokenizer.eos_token}


# 17: adapters and new tokens


def widened(folder: Path, count: int):
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([f"<{n}>" for n in range(count)])
    return tokenizer


def adapter_with_tokens(base: Path, folder: Path, count: int) -> Path:
    """Trained on two steps that use the new tokens."""
    tokenizer = widened(base, count)
    model = build_model(base, torch.float32)
    grow(model, tokenizer_rows(tokenizer))
    new = range(64, 64 + count)
    wrapped, source = attach_adapter(model, HubWeights(base, model), method(targets=("q_proj", "v_proj")), 0, new)
    with Engine(wrapped, engine_config(), source) as engine:
        ids = torch.tensor([[5, *new, 6, *new, 7, 8]])
        for _ in range(2):
            engine.step([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}])
        engine.export(folder, tokenizer=tokenizer)
    return folder


def loaded_alone(folder: str) -> tuple[int, list]:
    """In a fresh process, by PEFT from the untouched base: rows of the embedding, logits."""
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 64, 65, 6]]), use_cache=False).logits
    return model.get_input_embeddings().weight.shape[0], logits.tolist()


def merged_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 64, 65, 6]]), use_cache=False).logits


@pytest.mark.parametrize(("arch", "count"), [("llama", 2), ("llama_tied", 2), ("llama", 7)])
def test_17_adapter_with_new_tokens_loads_on_the_untouched_base(arch, count, tmp_path):
    """New rows are trained and saved beside the adapter, whose folder loads on the base as it is, in a fresh process."""
    base = base_folder(arch, tmp_path / "base")
    folder = adapter_with_tokens(base, tmp_path / "adapter", count)
    tensors = load_file(folder / "adapter_model.safetensors")
    rows = {key: t for key, t in tensors.items() if "trainable_tokens" in key}
    ends = 1 if arch == "llama_tied" else 2
    assert len(rows) == ends and all(t.shape == (count, 32) for t in rows.values())
    start = load_file(base / "model.safetensors")["model.embed_tokens.weight"].mean(0)
    assert all((row - start).abs().max() > 1e-4 for row in next(iter(rows.values())))
    size = sum(t.numel() for t in tensors.values())
    assert size == 2 * (4 * (32 + 32) + 4 * (32 + 16)) + ends * count * 32, "the adapter and the new rows, nothing else"
    [(found, logits)] = run_ranks(1, loaded_alone, str(folder))
    assert found == 64 + count and torch.tensor(logits).isfinite().all()


@pytest.mark.parametrize(("arch", "count"), [("llama", 2), ("llama_tied", 3)])
def test_17_adapter_with_new_tokens_goes_on_and_merges(arch, count, tmp_path):
    """zft goes on from such an adapter, and its merge has the rows: the logits are those of the adapter on the base."""
    base = base_folder(arch, tmp_path / "base")
    folder = adapter_with_tokens(base, tmp_path / "adapter", count)
    (tmp_path / "data.jsonl").write_text("{}\n")
    run = compose("sft", [f"model={base}", "data=data.jsonl", "out=o", "method=lora", f"method.adapter={folder}",
                          "precision=fp32", "engine.compute_device=cpu"], tmp_path)  # fmt: skip
    model, source = structure(run, base, run_tokenizer(run, base), World.single("cpu"))
    with Engine(model, engine_config(), source) as engine:
        engine.export(tmp_path / "merged", merge=True)
    [(_, logits)] = run_ranks(1, loaded_alone, str(folder))
    assert (merged_logits(tmp_path / "merged") - torch.tensor(logits)).abs().max() <= 1e-5
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == 64 + count


@pytest.mark.parametrize(("arch", "count"), [("llama", 2), ("llama_tied", 3)])
def test_17_adapter_with_new_tokens_needs_their_rows(arch, count, tmp_path):
    """Without the tokens that it was trained with the error names both sizes and the remedy, before anything is read."""
    base = base_folder(arch, tmp_path / "base")
    folder = adapter_with_tokens(base, tmp_path / "adapter", count)
    with pytest.raises(ZftError, match=f"row {63 + count} .*has 64 rows; grow the model to the tokenizer"):
        Engine.from_pretrained(base, engine_config(), method=method(adapter=str(folder)))


# 18: new rows of a partitioned model


def grown(base: str, folder: str, count: int) -> dict:
    """On each rank: `count` tokens more, exports before and after two steps; how the embedding is held here."""
    tokenizer = widened(Path(base), count)
    model = build_model(base)
    grow(model, tokenizer_rows(tokenizer))
    config = EngineConfig(compute_device="cpu", timeout_s=60, optim=AdamW(lr=0.02))
    with Engine(model, config, source=HubWeights(base, model)) as engine:
        masters = dict(engine.named_parameters())
        name = "model.embed_tokens.weight"
        group = next(g for g in engine.parts.records if any(span.name == name for span in g.layout.spans))
        record = engine.parts.records[group]
        held = record.ranges.hi_numel * engine.world.size, group.layout.padded_numel, sorted(record.slabs)
        engine.export(f"{folder}/before", base=base, tokenizer=tokenizer)
        ids = torch.tensor([[5, *(x for n in range(count) for x in (64 + n, 6)), 8]])
        for _ in range(2):
            engine.step([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}])
        engine.export(f"{folder}/after", base=base, tokenizer=tokenizer)
    ends = [tensor[64:].tolist() for key, tensor in masters.items() if key in (name, "lm_head.weight")]
    return {"rows": ends, "held": held, "vocab": model.config.vocab_size}


@pytest.mark.parametrize(
    ("arch", "size", "count"),
    [("llama", 1, 3), ("llama", 2, 3), ("llama", 3, 3), ("llama_tied", 2, 3), ("llama_tied", 3, 1), ("llama", 2, 9)],
)
def test_18_resize_of_partitioned_parameters(arch, size, count, tmp_path):
    """Growing keeps old rows to the bit, gives all ranks the same new ones, and shards and trains the new tensor."""
    base = tiny_folder(arch, tmp_path / "base")
    old = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    found = run_ranks(size, grown, str(base), str(tmp_path), count)
    for rank in found:
        assert rank["rows"] == found[0]["rows"] and rank["vocab"] == 64 + count
        assert rank["held"] == (rank["held"][1], rank["held"][1], ["grad", "hi", "lo", "m", "v"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    rows = model.model.embed_tokens.weight.data
    assert model.config.vocab_size == 64 + count
    assert rows.shape == model.lm_head.weight.shape == (64 + count, 32) and torch.equal(rows[:64], old)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "before")) == 64 + count
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "after").model.embed_tokens.weight.data
    assert all(not torch.equal(trained[row], rows[row]) for row in range(64, 64 + count)), (
        "new rows are in the optimizer"
    )


# 20: a token without a row


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "gpt2"])
def test_20_token_without_a_row_fails_at_setup(arch, tmp_path):
    """The check looks at the highest id against the rows, not at a batch: an added [PAD] is found before any data is."""
    model = build_model(tiny_folder(arch, tmp_path))
    tokenizer = tiny_tokenizer(64)
    check_tokens(model, tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(ZftError, match=r"'\[PAD\]' has id 64 but the model has 64 rows"):
        check_tokens(model, tokenizer)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
def test_20_run_has_a_row_for_every_token(micro_batch_size, tmp_path):
    """A run grows the model to its tokenizer's highest id before the first batch, whatever the size of a batch."""
    base = tiny_folder("llama", tmp_path / "base")
    tokenizer = tiny_tokenizer(64)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    path = write(tmp_path / "a.jsonl", [chat("a", "b" * n) for n in range(1, 6)])
    run = compose("sft", [f"model={base}", f"data={path}", "out=o", "engine.compute_device=cpu",
                          f"train.micro_batch_size={micro_batch_size}"], tmp_path)  # fmt: skip
    model, source = structure(run, base, tokenizer, World.single("cpu"))
    assert model.get_input_embeddings().weight.shape[0] == 65
    loader = prepare(path, tokenizer, seq_len=64).loader(0, 1, micro_batch_size, 1, 1)
    with Engine(model, run.engine, source, World.single("cpu")) as engine:
        while (step := loader.next_step()) is not None:
            assert torch.isfinite(torch.tensor(engine.step(step).loss))


@pytest.mark.parametrize("what", ["sft", "pretrain", "preview", "eval"])
def test_20_id_without_a_row_names_file_and_row(what, tmp_path, monkeypatch):
    """A row of data with an id that the embedding has no row for is named before the model is read.

    The tokenizer may emit ids that its vocabulary does not list.
    """
    tiny_folder("llama", tmp_path / "model")
    tiny_tokenizer(80).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("zft.models.load.tokenizer_rows", lambda tokenizer: 64)
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "a 9"}\n')
    recipe = what if what in ("sft", "pretrain") else "sft"
    given = [f"model={tmp_path}/model", f"data={tmp_path}/a.jsonl"]
    run = compose(recipe, [*given, "out=out", "engine.compute_device=cpu"], tmp_path)
    with pytest.raises(
        ZftError, match=r"a\.jsonl:2: token outside the embedding: id \d\d, the model's embedding has 64 rows"
    ):
        if what == "preview":
            preview(recipe, given, as_json=True, html=None)
        elif what == "eval":
            evaluate_model(run, World.single("cpu"), "sft")
        else:
            execute(run)
    assert not (tmp_path / "out").exists()


def test_20_rows_are_those_after_growing(tmp_path):
    """The rows that ids are checked against are those of the model once it is grown to its tokenizer."""
    config = load_config(tiny_folder("llama", tmp_path))
    assert [embedding_rows(config, tiny_tokenizer(size)) for size in (10, 64, 70)] == [64, 64, 70]
