"""CASES b: tied embeddings (10, 11, 12)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from tests.tiny import tiny_folder

TRAIN_AND_EXPORT = """
import sys, torch
from zft.api import AdamW, Engine, EngineConfig
base, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = Engine.from_pretrained(base, EngineConfig(compute_device="cpu", timeout_s=60, optim=AdamW(lr=0.02)))
ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(engine.world.rank))
for _ in range(steps):
    engine.step([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}])
engine.export(out, max_shard_size="8KB")
engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_10_11_12_one_key_counted_once_and_aliased_after_reload(size: int, tmp_path: Path) -> None:
    base = tiny_folder("llama_tied", tmp_path / "base")
    run_ranks(TRAIN_AND_EXPORT, size, base, tmp_path / "out", 2)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert "model.embed_tokens.weight" in index["weight_map"] and "lm_head.weight" not in index["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        tensors |= load_file(file)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in tensors.values())

    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    trained = tensors["model.embed_tokens.weight"]
    assert torch.equal(model.lm_head.weight.data, trained)
    assert not torch.equal(trained, load_file(base / "model.safetensors")["model.embed_tokens.weight"]), (
        "it was trained"
    )
