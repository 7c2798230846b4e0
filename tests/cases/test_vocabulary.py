"""CASES c: vocabulary and pad token (18, 20)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import run_ranks
from tests.tiny import tiny_folder, tiny_tokenizer
from zft.commands.preview import preview
from zft.compose import compose
from zft.config import ZftError
from zft.dist import World
from zft.execute import execute
from zft.models.load import build_model, check_tokens, embedding_rows, load_config
from zft.train.evaluate import evaluate_model

GROW = """
import sys, torch
from zft.api import AdamW, Engine, EngineConfig
from zft.models.load import HubWeights, build_model, grow, load_tokenizer, tokenizer_rows
base, out = sys.argv[1:]
tokenizer = load_tokenizer(base)
tokenizer.add_tokens(["<a>", "<b>", "<c>"])
model = build_model(base)
grow(model, tokenizer_rows(tokenizer))
config = EngineConfig(compute_device="cpu", timeout_s=60, optim=AdamW(lr=0.02))
engine = Engine(model, config, source=HubWeights(base, model))
rows = [tensor for name, tensor in engine.named_parameters() if name == "model.embed_tokens.weight"][0][64:]
print("ROWS", rows.double().sum().item())
engine.export(out + "/before", base=base, tokenizer=tokenizer)
ids = torch.tensor([[5, 64, 6, 65, 7, 66, 8]])
for _ in range(2):
    engine.step([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}])
engine.export(out + "/after", base=base, tokenizer=tokenizer)
engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "size"), [("llama", 1), ("llama", 2), ("llama_tied", 2)])
def test_18_three_tokens_more_on_partitioned_parameters(arch: str, size: int, tmp_path: Path) -> None:
    base = tiny_folder(arch, tmp_path / "base")
    old = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    printed = run_ranks(GROW, size, base, tmp_path)
    assert len({line.split("ROWS")[1] for line in printed}) == 1, "new rows are equal on all ranks"

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    rows = model.model.embed_tokens.weight.data
    assert model.config.vocab_size == 67 and rows.shape == (67, 32) and model.lm_head.weight.shape == (67, 32)
    assert torch.equal(rows[:64], old)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "before")) == 67
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "after").model.embed_tokens.weight.data
    assert all(not torch.equal(trained[row], rows[row]) for row in (64, 65, 66)), "new rows are in the optimizer"


def test_20_a_pad_token_without_a_row_fails_at_setup(tmp_path: Path) -> None:
    model = build_model(tiny_folder("llama", tmp_path))
    tokenizer = tiny_tokenizer(64)
    check_tokens(model, tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(ZftError, match=r"'\[PAD\]' has id 64 but the model has 64 rows"):
        check_tokens(model, tokenizer)


@pytest.mark.parametrize("what", ["sft", "pretrain", "preview", "eval"])
def test_an_id_without_a_row_names_file_and_row(what: str, tmp_path: Path, monkeypatch) -> None:
    """A tokenizer may emit ids that its vocabulary does not list, so that the embedding is not grown for them."""
    tiny_folder("llama", tmp_path / "model")
    tiny_tokenizer(80).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("zft.models.load.tokenizer_rows", lambda tokenizer: 64)
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "a 9"}\n')
    recipe = what if what in ("sft", "pretrain") else "sft"
    given = [f"model={tmp_path}/model", f"data={tmp_path}/a.jsonl"]
    run = compose(recipe, [*given, "out=out", "engine.compute_device=cpu"], tmp_path)
    said = r"a\.jsonl:2: token outside the embedding: id \d\d, the model's embedding has 64 rows"
    with pytest.raises(ZftError, match=said):
        if what == "preview":
            preview(recipe, given, as_json=True, html=None)
        elif what == "eval":
            evaluate_model(run, World.single("cpu"), "sft")
        else:
            execute(run)
    assert not (tmp_path / "out").exists()


def test_rows_are_those_after_growing(tmp_path: Path) -> None:
    config = load_config(tiny_folder("llama", tmp_path))
    assert [embedding_rows(config, tiny_tokenizer(size)) for size in (10, 64, 70)] == [64, 64, 70]
