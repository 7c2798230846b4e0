"""MXFP4 and FP8 folders, dequantized while streaming, against transformers' own dequantized load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from tests.tiny import tiny_folder
from zft.checkpoint.foreign import by_layer
from zft.checkpoint.hf import export_folder
from zft.models.load import HubWeights, build_model


def mxfp4_folder(path: Path) -> Path:
    """GPT-OSS as it is published: experts as 4-bit codes with one exponent for each 32 values, the rest bfloat16."""
    folder = tiny_folder("gpt_oss", path, intermediate_size=64)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape  # stored transposed: [experts, out, in / 32, 16]
        tensors[name + "_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return quantize_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})


def fp8_folder(path: Path) -> Path:
    """DeepSeek-V3 as it is published: matrices as float8 with a float32 scale for each block."""
    folder = tiny_folder("deepseek_v3", path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].float().mul(50).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.rand(2 if rows % 2 == 0 else 1, 2 if columns % 2 == 0 else 1) / 50
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return quantize_config(folder, settings)


def quantize_config(folder: Path, settings: dict) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


@pytest.mark.parametrize(
    ("make", "settings"),
    [(mxfp4_folder, Mxfp4Config(dequantize=True)), (fp8_folder, FineGrainedFP8Config(dequantize=True))],
)
def test_dequantized_as_transformers_does(make, settings, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = make(tmp_path / "base")
    reference = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.bfloat16)
    model = build_model(folder)
    weights = HubWeights(folder, model)
    got = {name: tensor for unit in by_layer(weights, model) for name, tensor in unit.items()}
    assert got.keys() == dict(reference.named_parameters()).keys() | {n for n in got if n.endswith("_bias")}
    for name, parameter in reference.named_parameters():
        assert torch.equal(got[name], parameter.data.to(got[name].dtype)), name

    export_folder(tmp_path / "out", by_layer(weights, model), model, folder)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    ids = torch.arange(3, 20)[None]
    assert torch.equal(loaded(ids).logits, reference(ids).logits)
