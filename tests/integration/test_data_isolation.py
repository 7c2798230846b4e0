"""Packed and separate losses of every family on eager and sdpa: equal where packing is allowed, refused elsewhere."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer
from zft.config import ZftError
from zft.data import DataOptions, prepare
from zft.data.collate import packed, padded
from zft.data.isolation import packing_problem

EXTRA = ["gemma3n", "mixtral_top1", "llama3_rope"]


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    out = []
    for length in (7, 1, 5, 19, 3):  # longer than the tiny models' sliding window, and a single token
        mask = np.ones(length, np.uint8)
        mask[0] = 0
        out.append((rng.integers(5, 60, length).astype(np.int32), mask))
    return out


def ce_sum(model, batch: dict[str, torch.Tensor]) -> float:
    """Cross-entropy summed over targets."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits.double()
    labels = batch["labels"][:, 1:].reshape(-1)
    return cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels, ignore_index=-100, reduction="sum"
    ).item()


def losses(model) -> dict[str, float]:
    docs = documents()
    return {
        "separate": sum(ce_sum(model, padded([document], 0)) for document in docs),
        "padded": ce_sum(model, padded(docs, 0)),
        "packed": ce_sum(model, packed([docs[:3], docs[3:]], 0, flat=False)),
        "flat": ce_sum(model, packed([docs[:3], docs[3:]], 0, flat=True)),
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA])
def test_packed_equals_separate(family: str, attention: str):
    try:
        model = tiny_model(family, attn_implementation=attention)
    except ValueError as error:
        assert "does not support" in str(error), error
        pytest.skip(f"{family} has no {attention} attention in transformers")
    found = losses(model)
    separate = found.pop("separate")
    tokens = sum(int(mask.sum()) for _, mask in documents())
    assert abs(found["padded"] - separate) / tokens < 1e-5
    leak = max(abs(found[name] - separate) for name in ("packed", "flat"))
    if packing_problem(model) is None:
        assert leak / tokens < 1e-5, found
    else:
        assert leak > 1e-3, "packing is refused although documents stay apart"


def test_the_probe_leaves_the_model_and_transformers_alone():
    from transformers.models.opt import modeling_opt

    maker = modeling_opt.create_causal_mask
    model = tiny_model("opt")
    before = losses(model)
    assert packing_problem(model) == "its code makes the attention mask without position_ids"
    assert modeling_opt.create_causal_mask is maker and losses(model) == before
    assert packing_problem(model.to("meta")) == "its code makes the attention mask without position_ids"
    assert packing_problem(tiny_model("gpt2").to("meta")) is None


def test_models_with_a_state_are_refused():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert "position_ids" in packing_problem(AutoModelForCausalLM.from_config(config))
    config = AutoConfig.for_model(
        "qwen3_next", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=32, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert "state along the sequence linear_attention" in packing_problem(model)


def test_loader_batches_of_packed_conversations(tmp_path):
    """The whole way: a file, packed and not, summed over an epoch, gives one loss."""
    path = tmp_path / "rows.jsonl"
    words = ["a b", "c d e", "f", "g h a c", "b b", "d a e i o u"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": words[n % 6]},
                {"role": "assistant", "content": words[(n * 5 + 1) % 6]},
            ]
        }
        for n in range(23)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tokenizer = tiny_model("llama", vocab_size=100, max_position_embeddings=512), tiny_tokenizer(100)
    sums = {}
    for name, options in {
        "plain": DataOptions(), "packed": DataOptions(pack=True), "free": DataOptions(padding_free=True),
        "both": DataOptions(pack=True, padding_free=True), "grouped": DataOptions(length_grouped=True),
    }.items():  # fmt: skip
        prepared = prepare(str(path), tokenizer, options, seq_len=200)
        prepared.keep_apart(model)
        loader, total = prepared.loader(0, 1, 3, 2, 1), 0.0
        while (step := loader.next_step()) is not None:
            total += sum(ce_sum(model, batch) for batch in step)
        sums[name] = total / prepared.report.supervised_tokens
    assert max(sums.values()) - min(sums.values()) < 1e-5, sums


def test_packing_is_refused_or_laid_flat_by_the_model(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b c"}\n{"text": "d e"}\n')
    tokenizer = tiny_tokenizer(100)
    prepared = prepare(str(path), tokenizer, DataOptions(pack=True), seq_len=16)
    with pytest.raises(
        ZftError, match=r"data_options.pack=true: OPTForCausalLM can't keep rows apart .*set it to false"
    ):
        prepared.keep_apart(tiny_model("opt"))
    prepare(str(path), tokenizer, seq_len=16).keep_apart(tiny_model("opt"))
    model, loader = tiny_model("llama"), prepared.loader(0, 1, 4, 1, 1)
    model.config._attn_implementation_internal = "flash_attention_2"
    prepared.keep_apart(model)
    assert loader.next_step()[0]["position_ids"].shape[0] == 1
