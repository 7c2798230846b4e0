"""Gradients, weights and first values of adapters on 1, 2 and 3 ranks, against PEFT in a plain loop."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.adapters import (
    OPTIM,
    base_folder,
    batches,
    difference,
    engine_config,
    gradients,
    method,
    peft_model,
    random_adapter,
)
from tests.harness import run_ranks
from tests.plain import plain_loop
from zft.api import Engine

ARCHS = ("llama", "llama_qknorm", "gpt2", "mixtral", "qwen3_moe")
TIERS = ("device", "cpu", "nvme")
MICRO_BATCHES = 4


def parity(base: str, adapter: str, name: str, folder: str) -> dict[str, tuple[float, float, float]]:
    """{cell: largest difference of losses, gradients and weights from the plain loop, over three steps}."""
    steps = [batches(MICRO_BATCHES, seed=seed) for seed in range(3)]
    reference = peft_model(Path(base), Path(adapter), trainable=True)
    plain = plain_loop(reference, steps, OPTIM, max_grad_norm=1.0)
    found = {}
    for activation, tier in product(("none", "full"), TIERS):
        tiers = dict.fromkeys(("param_tier", "state_tier", "grad_tier"), tier)
        config = engine_config(activation=activation, nvme_dir=f"{folder}/{activation}-{tier}", **tiers)
        with Engine.from_pretrained(base, config, method=method(name, adapter=adapter)) as engine:
            rank, size, worst = engine.world.rank, engine.world.size, [0.0, 0.0]
            for index, micro_batches in enumerate(steps):
                result = engine.step(micro_batches[rank::size])
                worst[0] = max(worst[0], abs(result.loss - plain.losses[index]))
                worst[1] = max(worst[1], difference(gradients(engine), plain.gradients[index]))
            trained = {n: t for n, t in engine.named_parameters() if n in plain.weights}
            found[f"{activation} {tier}"] = (*worst, difference(trained, plain.weights))
    return found


def parity_of_all(folder: str) -> dict[str, dict]:
    paths = {arch: f"{folder}/{arch}" for arch in ARCHS}
    return {arch: parity(path, f"{path}-adapter", "lora", f"{path}-tiers") for arch, path in paths.items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parity(size, tmp_path):
    for arch in ARCHS:
        base = base_folder(arch, tmp_path / arch)
        random_adapter(base, tmp_path / f"{arch}-adapter", method())
    for found in run_ranks(size, parity_of_all, str(tmp_path), timeout_s=400):
        assert found.keys() == set(ARCHS) and all(len(cells) == 6 for cells in found.values())
        for arch, cells in found.items():
            for cell, worst in cells.items():
                assert max(worst) <= 1e-6, (arch, cell, worst)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dora", {}),
        ("rslora", {"targets": ("lm_head", "embed_tokens", "up_proj")}),
        ("lora", {"modules_to_save": ("lm_head", "model.norm"), "targets": ("q_proj",)}),
    ],
)
def test_parity_of_variants(name, options, tmp_path):
    """DoRA; adapters on the embedding and the head, whose loss takes another path; modules trained in full."""
    base = base_folder("llama", tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "adapter", method(name, **options))
    for found in run_ranks(2, parity, str(base), str(adapter), name, str(tmp_path)):
        assert max(max(worst) for worst in found.values()) <= 1e-6, found


def first_values(base: str, name: str) -> dict[str, torch.Tensor]:
    options = method(name, modules_to_save=("lm_head",)) if name == "lora" else method(name)
    with Engine.from_pretrained(base, engine_config(), method=options) as engine:
        return {n: t.numpy() for n, t in engine.named_parameters()}


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_first_values_are_the_same_at_every_world_size(name, tmp_path):
    base = base_folder("llama", tmp_path / "base")
    one = run_ranks(1, first_values, str(base), name)[0]
    for size in (2, 3):
        for other in run_ranks(size, first_values, str(base), name):
            assert other.keys() == one.keys()
            assert all((other[key] == one[key]).all() for key in one)


def export(base: str, folder: str) -> list[tuple[str, tuple[int, ...], bool]]:
    """Tensors of adapter exports after a step: name, shape, whether anything in it is not zero."""
    from safetensors.torch import load_file

    options = method("lora", targets=("q_proj", "v_proj"))
    with Engine.from_pretrained(base, engine_config(), method=options) as engine:
        engine.step(batches(1) if engine.world.is_main else [])
        engine.export(f"{folder}/adapter")
        engine.export(f"{folder}/merged", merge=True)
    if not engine.world.is_main:
        return []
    tensors = load_file(f"{folder}/adapter/adapter_model.safetensors")
    return [(name, tuple(tensor.shape), bool(tensor.any())) for name, tensor in sorted(tensors.items())]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_export_is_whole_at_every_world_size(size, tmp_path):
    """Case 22: 2 layers x 2 targets x 2 tensors, full shapes, B trained."""
    base = base_folder("llama", tmp_path / "base")
    found = run_ranks(size, export, str(base), str(tmp_path))[0]
    assert len(found) == 8
    for name, shape, is_set in found:
        rows = 16 if "v_proj" in name else 32  # two of four heads for keys and values
        assert name.startswith("base_model.model.model.layers.") and name.endswith(".weight") and "default" not in name
        assert shape == ((4, 32) if "lora_A" in name else (rows, 4)) and is_set, name
    assert (tmp_path / "merged" / "model.safetensors").stat().st_size > 10_000


def quantized(base: str, adapter: str, folder: str) -> dict[str, list]:
    """{stage and tier: losses, and all weights as they compute} of two steps of QLoRA."""
    found = {}
    for stage, tier in ((3, "nvme"), (3, "device"), (2, "cpu"), (0, "nvme")):
        config = engine_config(precision="bf16", stage=stage, param_tier=tier, nvme_dir=f"{folder}/tiers-{stage}{tier}")
        with Engine.from_pretrained(base, config, method=method("qlora", adapter=adapter)) as engine:
            rank, size = engine.world.rank, engine.world.size
            losses = [engine.step(batches(MICRO_BATCHES, seed=seed)[rank::size]).loss for seed in range(2)]
            frozen = {n: t.numpy() for unit in engine.stream_units() for n, t in unit.items() if "base_layer" in n}
            found[f"{stage} {tier}"] = [losses, {name: value.copy() for name, value in frozen.items()}]
    return found


def test_quantized_weights_are_the_same_on_any_ranks_stage_and_tier(tmp_path):
    base = base_folder("llama", tmp_path / "base", dtype=torch.bfloat16)
    adapter = random_adapter(base, tmp_path / "adapter", method())
    one = run_ranks(1, quantized, str(base), str(adapter), str(tmp_path / "1"))[0]["3 device"]
    assert len(one[1]) == 14
    for size in (1, 2, 3):
        for cells in run_ranks(size, quantized, str(base), str(adapter), str(tmp_path / str(size))):
            for cell, (losses, weights) in cells.items():
                assert losses == pytest.approx(one[0], abs=1e-5), (size, cell)
                assert all((weights[name] == value).all() for name, value in one[1].items()), (size, cell)
