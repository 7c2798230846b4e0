"""Folder -> engine with everything on NVMe -> step -> export, for every family: nothing is lost or renamed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny import ARCHS, tiny_folder
from zft.api import AdamW, Engine, EngineConfig


def nvme(folder: Path, **settings) -> EngineConfig:
    folder.mkdir()
    tiers = {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"}
    return EngineConfig(**tiers, nvme_dir=str(folder), compute_device="cpu", optim=AdamW(lr=0.05), **settings)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_untouched_weights_come_back_bit_for_bit_and_trained_ones_load(arch: str, tmp_path: Path) -> None:
    base = tiny_folder(arch, tmp_path / "base")
    with Engine.from_pretrained(base, nvme(tmp_path / "nvme")) as engine:
        engine.export(tmp_path / "before")
        engine.step([batch()])
        trained = dict(engine.named_parameters())
        engine.export(tmp_path / "after")
        engine.export(tmp_path / "masters", dtype=torch.float32)
    old, before = load_file(base / "model.safetensors"), load_file(tmp_path / "before/model.safetensors")
    assert old.keys() == before.keys()
    assert all(torch.equal(before[name], tensor.to(before[name].dtype)) for name, tensor in old.items())
    for folder, tolerance in (("after", 0.5 / 128), ("masters", 0.0)):
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        for name, parameter in model.named_parameters():
            difference = (parameter.float() - trained[name]).abs()
            assert (difference <= tolerance * trained[name].abs() + 1e-38).all(), name
            assert parameter.dtype == torch.float32 or folder == "after"


def test_a_float32_base_stays_float32_although_the_engine_computes_in_bfloat16(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base", dtype=torch.float32)
    with Engine.from_pretrained(base, nvme(tmp_path / "nvme", precision="bf16")) as engine:
        engine.export(tmp_path / "out")
    old, new = load_file(base / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items()), (
        "hi and lo together are the float32 bits"
    )
