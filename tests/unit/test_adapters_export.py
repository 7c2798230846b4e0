"""Adapter folders and merges: PEFT's names and values, bits of merged weights, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.adapters import base_folder, batches, engine_config, method, peft_model, random_adapter
from tests.tiny import CHATML, tiny_tokenizer
from zft.api import Engine
from zft.checkpoint.merge import merged_weight
from zft.checkpoint.names import ExportError
from zft.config import ZftError

IDS = torch.arange(5, 37).view(2, 16)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def peft_key(name: str) -> str:
    for removed in (".default", ".modules_to_save"):
        name = name.replace(removed, "")
    return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name


def exported(base: Path, folder: Path, name: str = "lora", precision: str = "fp32", **options) -> tuple[Path, Path]:
    """An adapter, trained on for two steps, as a PEFT folder and merged."""
    adapter = random_adapter(base, folder / "start", method(name, **options))
    config = engine_config(precision=precision)
    with Engine.from_pretrained(base, config, method=method(name, adapter=str(adapter))) as engine:
        for seed in range(2):
            engine.step(batches(2, seed=seed))
        engine.export(folder / "adapter", tokenizer=tiny_tokenizer(), facts={"base_model": str(base), "steps": 2})
        engine.export(folder / "merged", merge=True)
        masters = dict(engine.named_parameters())
    keys = load_file(folder / "adapter" / "adapter_model.safetensors")
    for key, tensor in keys.items():
        ours = [tensor for name, tensor in masters.items() if peft_key(name) == key]
        assert len(ours) == 1 and torch.equal(ours[0], tensor), key
    return folder / "adapter", folder / "merged"


@pytest.mark.parametrize(
    ("arch", "name", "options"),
    [
        ("llama", "lora", {}),
        ("llama", "dora", {}),
        ("llama", "rslora", {"targets": ("q_proj", "embed_tokens", "lm_head")}),
        ("llama", "lora", {"modules_to_save": ("lm_head", "norm")}),
        ("llama_tied", "lora", {}),
        ("gpt2", "lora", {}),
        ("gpt2", "dora", {}),
        ("mixtral", "lora", {}),
        ("qwen3_moe", "lora", {"targets": ("q_proj", "experts.gate_up_proj")}),
        ("deepseek_v3", "lora", {}),
    ],
)
def test_merged_equals_peft(arch, name, options, tmp_path):
    base = base_folder(arch, tmp_path / "base")
    adapter, merged = exported(base, tmp_path, name, **options)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = logits(peft_model(base, adapter))
    assert (logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)) - theirs).abs().max() <= 1e-5
    assert (logits(plain) - theirs).abs().max() > 0.01
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()


@pytest.mark.parametrize("name", ["lora", "rslora"])
def test_merged_bf16_has_one_rounding(name, tmp_path):
    """bf16(fp32(W) + scale * B A), to the last bit, in the base's dtype (case 25); the rest is the base's, bit for bit."""
    base = base_folder("llama", tmp_path / "base", dtype=torch.bfloat16)
    adapter, merged = exported(base, tmp_path, name, precision="bf16")
    tensors, before = load_file(adapter / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    after, scale = load_file(merged / "model.safetensors"), 8.0 / (4 if name == "lora" else 2)
    assert before.keys() == after.keys() and {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    changed = 0
    for key, tensor in after.items():
        path = f"base_model.model.{key.removesuffix('.weight')}"
        expected = before[key]
        if f"{path}.lora_A.weight" in tensors:
            product = tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]
            expected, changed = (expected.float() + scale * product).bfloat16(), changed + 1
        assert torch.equal(tensor, expected), key
    assert changed == 14


def test_the_folder_is_peft_s(tmp_path):
    """Cases 22, 24, 88: PEFT's names without the adapter's, the base's name, tokenizer and the template trained with."""
    base = base_folder("llama", tmp_path / "base", dtype=torch.bfloat16)
    adapter, _ = exported(base, tmp_path, precision="bf16", targets=("q_proj", "v_proj"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == 8 and {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for key in tensors:
        assert key.startswith("base_model.model.model.layers.") and "default" not in key
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["inference_mode"] is True
    assert set(config["target_modules"]) == {"q_proj", "v_proj"} and config["task_type"] == "CAUSAL_LM"
    assert AutoTokenizer.from_pretrained(adapter).chat_template == CHATML
    card = (adapter / "README.md").read_text()
    assert "library_name: peft" in card and "AutoPeftModelForCausalLM" in card
    assert not (adapter / "config.json").exists()


def test_the_base_is_named_as_the_user_named_it(tmp_path):
    base = base_folder("llama", tmp_path / "base")
    with Engine.from_pretrained(base, engine_config(), method=method(targets=("q_proj",))) as engine:
        engine.export(tmp_path / "adapter", facts={"base_model": "some-org/some-model"})
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some-org/some-model"
    assert "base_model: some-org/some-model" in (tmp_path / "adapter" / "README.md").read_text()


def test_what_is_not_finite_is_not_exported(tmp_path):
    base = base_folder("llama", tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "start", method(targets=("q_proj",)))
    tensors = load_file(adapter / "adapter_model.safetensors")
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key][0, 0] = float("inf")
    from safetensors.torch import save_file

    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with Engine.from_pretrained(base, engine_config(), method=method(adapter=str(adapter))) as engine:
        with pytest.raises(ExportError, match="not finite after merging"):
            engine.export(tmp_path / "merged", merge=True)
        with pytest.raises(ExportError, match="not finite"):
            engine.export(tmp_path / "adapter")
        assert not (tmp_path / "merged").exists() and not (tmp_path / "adapter").exists()


def test_merge_is_for_adapters(tmp_path):
    base = base_folder("llama", tmp_path / "base")
    with Engine.from_pretrained(base, engine_config()) as engine, pytest.raises(ZftError, match="only an adapter"):
        engine.export(tmp_path / "merged", merge=True)


def test_merging_leaves_the_layer_as_it_was(tmp_path):
    base = base_folder("llama", tmp_path / "base")
    model = peft_model(base, random_adapter(base, tmp_path / "adapter", method("dora")))
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    local = {n: p for n, p in layer.named_parameters() if "base_layer" not in n}
    before = {n: p.clone() for n, p in layer.named_parameters()}
    merged = merged_weight(layer, layer.base_layer.weight, local)
    assert all(torch.equal(p, before[n]) for n, p in layer.named_parameters()) and not layer.merged
    x = torch.randn(3, 32)
    assert torch.allclose(x @ merged.T, layer(x), atol=1e-6)


def test_an_adapter_goes_on_and_merges_after_qlora(tmp_path):
    """The merge takes the base's own weights, not the quantized ones."""
    base = base_folder("llama", tmp_path / "base", dtype=torch.bfloat16)
    adapter = random_adapter(base, tmp_path / "start", method())
    with Engine.from_pretrained(
        base, engine_config(precision="bf16"), method=method("qlora", adapter=str(adapter))
    ) as engine:
        engine.export(tmp_path / "same")
        engine.export(tmp_path / "merged", merge=True)
    start, same = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(tmp_path / "same" / "adapter_model.safetensors"),
    )
    assert all(torch.equal(start[key], same[key]) for key in start | same)
    key = "model.layers.0.mlp.up_proj.weight"
    path = "base_model.model.model.layers.0.mlp.up_proj"
    weight = load_file(base / "model.safetensors")[key].float()
    expected = weight + 2.0 * (start[f"{path}.lora_B.weight"] @ start[f"{path}.lora_A.weight"])
    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")[key], expected.bfloat16())
