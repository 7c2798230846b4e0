"""Weights read from a checkpoint are those of the engine that saved it."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import tiny_model
from zft.api import Engine
from zft.checkpoint.manifest import DamagedCheckpoint
from zft.checkpoint.source import StoredWeights, by_layer
from zft.config import AdamW, EngineConfig
from zft.models.tensorfile import TensorFile


def trained(tmp_path, **config) -> Engine:
    engine = Engine(tiny_model("llama"), EngineConfig(compute_device="cpu", **config))
    ids = torch.arange(2, 34).reshape(2, 16)
    for _ in range(2):
        engine.step([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}], lr=1e-2)
    engine.save(tmp_path / "step-00000002", {"step": 2})
    return engine


@pytest.mark.parametrize(
    "config",
    [
        {"precision": "bf16"},
        {"precision": "fp32"},
        {"precision": "fp16"},
        {"optim": AdamW(compact=True), "precision": "bf16"},
    ],
    ids=["bf16", "fp32", "fp16", "compact"],
)
def test_masters_and_computing_weights(tmp_path, config):
    engine = trained(tmp_path, **config)
    stored = StoredWeights(tmp_path / "step-00000002")
    assert stored.manifest.train == {"step": 2}
    masters = dict(engine.named_parameters())
    assert set(masters) <= set(stored.manifest.tensors)
    for name, master in masters.items():
        read = stored.read(name, torch.float32)
        assert read.dtype == torch.float32 and torch.equal(read, master), name
    for dtype in (torch.bfloat16, torch.float16):
        live = {name: tensor.clone() for unit in engine.stream_units(dtype) for name, tensor in unit.items()}
        there = {name: tensor for unit in stored.units(dtype) for name, tensor in unit.items()}
        assert live.keys() <= there.keys()
        assert all(torch.equal(there[name].to(dtype), tensor) for name, tensor in live.items())
    stored.close()
    engine.close()


@pytest.mark.parametrize("field", ["hi", "lo", "m", "digests"])
def test_a_flipped_byte_of_a_weight_is_found_when_it_is_read(tmp_path, field):
    trained(tmp_path).close()
    [shard] = (tmp_path / "step-00000002").glob("*.safetensors")
    with TensorFile(shard) as file:
        key = next(key for key in file.entries if key == field or f"/{field}/" in key)
        name, at = key.partition("/")[0], file.entries[key].start
    content = bytearray(shard.read_bytes())
    content[at] ^= 1
    shard.write_bytes(content)
    stored = StoredWeights(tmp_path / "step-00000002")
    if field == "m":
        assert stored.read(name, torch.float32).isfinite().all(), "moments are not read"
        return
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        for tensor in stored.manifest.tensors:
            stored.read(tensor, torch.float32)


def test_by_layer():
    names = ["embed.weight", "layers.0.a", "layers.0.b", "layers.1.a", "norm", "head"]
    assert list(by_layer(names)) == [["embed.weight"], ["layers.0.a", "layers.0.b"], ["layers.1.a"], ["norm"], ["head"]]
    assert list(by_layer([])) == []
