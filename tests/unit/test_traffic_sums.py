"""The planner's sums equal the engine's counters, byte for byte, on tiny models in every placement."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.tiny import tiny_model
from zft.api import Engine, checked
from zft.config import SGD, AdamW, EngineConfig
from zft.plan.shapes import planned_world, shape_of
from zft.plan.traffic import Bytes, drain_traffic, evaluate_traffic, step_traffic

MICRO_BATCHES, TOKENS = 4, 4 * 12
TIERS = ("device", "cpu", "nvme")
WAYS = {
    "clipped": {},
    "immediate": {"max_grad_norm": None, "nonfinite": "raise"},
    "waves": {"wave": 1},
    "two waves, offload": {"wave": 2, "activation": "offload", "activation_tier": "nvme"},
}


def micro_batches(vocab: int = 64) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(5, vocab, (1, 12), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
    return made


def check(arch: str, tmp_path, steps: int = 3, frozen: bool = False, **settings) -> None:
    """Counters of the first step, of steady ones, of a drain and of an evaluation against the sums."""
    config = checked(EngineConfig(nvme_dir=str(tmp_path / "tiers"), **settings))
    world = planned_world(1, None, "cpu")
    model = tiny_model(arch, dtype=torch.float32 if config.precision == "fp32" else torch.bfloat16)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name)
    shape = shape_of(model, config, world)
    batch = (-(-MICRO_BATCHES // (config.wave or MICRO_BATCHES)), TOKENS)
    with Engine(model, config) as engine:
        for step in range(steps):
            counted = engine.step(micro_batches()).traffic
            assert step_traffic(shape, config, world, batch, first=step == 0).total.as_dict() == counted, f"step {step}"
        engine.drain()
        assert drain_traffic(shape, config, world).as_dict() == engine.parts.traffic.take()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("param", "state", "grad"), list(itertools.product(TIERS, repeat=3)))
def test_every_placement(tmp_path, param, state, grad, way):
    check("llama", tmp_path, param_tier=param, state_tier=state, grad_tier=grad, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", ["llama_tied", "gemma2", "gpt2", "opt", "mixtral", "gpt_oss"])
def test_every_kind_of_unit(tmp_path, arch, way):
    check(arch, tmp_path, param_tier="nvme", state_tier="nvme", grad_tier="nvme", **WAYS[way])


@pytest.mark.parametrize("way", ["clipped", "waves"])
@pytest.mark.parametrize(
    "settings",
    [{"precision": "fp32"}, {"precision": "fp16"}, {"optim": AdamW(compact=True)}, {"optim": SGD()}, {"stage": 0}],
    ids=["fp32", "fp16", "compact", "sgd", "stage 0"],
)
def test_every_record(tmp_path, settings, way):
    check("llama_tied", tmp_path, param_tier="nvme", state_tier="nvme", grad_tier="nvme", **settings, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_frozen_weights(tmp_path, way):
    check("llama", tmp_path, frozen=True, param_tier="nvme", state_tier="cpu", grad_tier="cpu", **WAYS[way])


def test_an_evaluation(tmp_path):
    config = checked(EngineConfig(nvme_dir=str(tmp_path), param_tier="nvme", state_tier="nvme", grad_tier="nvme"))
    world = planned_world(1, None, "cpu")
    model = tiny_model("llama", dtype=torch.bfloat16)
    shape = shape_of(model, config, world)
    with Engine(model, config) as engine:
        engine.evaluate(micro_batches())  # attaches the leftovers
        engine.parts.traffic.take()
        engine.evaluate(micro_batches())
        assert evaluate_traffic(shape, config, world, 1).as_dict() == engine.parts.traffic.take()


def test_the_formula_of_the_design():
    """bf16 layer, all on NVMe: read 12 + 4W - 2 + g, written 12 + g, h2d 4W, d2h 2; parking 4 in and 4 out a further wave."""
    world = planned_world(1, None, "cpu")
    model = tiny_model("llama", dtype=torch.bfloat16)
    for waves in (1, 3):
        config = checked(EngineConfig(nvme_dir="x", param_tier="nvme", state_tier="nvme", grad_tier="nvme", wave=1))
        shape = shape_of(model, config, world)
        layer = next(u for u in shape.units if u.name.endswith("layers.0"))
        without = shape.__class__(shape.name, (shape.units[0], layer), (), shape.dims, 4)
        only = shape.__class__(shape.name, (shape.units[0],), (), shape.dims, 4)
        got = _minus(
            step_traffic(without, config, world, (waves, 0)).total, step_traffic(only, config, world, (waves, 0)).total
        )
        numel, parked = layer.groups[0].padded_numel, 4 * (waves - 1)
        read, written = 12 + 4 * waves - 2 + 2 + parked, 12 + 2 + parked
        assert got == Bytes(read * numel, written * numel, (4 * waves + parked) * numel, (2 + parked) * numel)


def _minus(a: Bytes, b: Bytes) -> Bytes:
    return a + b * -1


def test_the_model_is_left_as_it_was():
    model = tiny_model("llama_tied")
    before = {name: (id(p), p.sum().item()) for name, p in model.named_parameters(remove_duplicate=False)}
    shape_of(model, checked(EngineConfig()), planned_world(1, None, "cpu"))
    assert {n: (id(p), p.sum().item()) for n, p in model.named_parameters(remove_duplicate=False)} == before


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_divide_what_the_stage_shards(stage):
    """One rank of four: shards of the record, of the gradient, of the weights."""
    config = checked(EngineConfig(stage=stage, nvme_dir="x", param_tier="nvme", state_tier="nvme", grad_tier="nvme"))
    world = planned_world(4, None, "cpu")
    shape = shape_of(tiny_model("llama", dtype=torch.bfloat16), config, world)
    group = shape.units[1].groups[0]
    ranges = group.ranges(stage, world)
    shares = [group.padded_numel // n for n in (ranges.hi_numel, ranges.state_numel, ranges.grad_numel)]
    assert shares == [4 if stage >= 3 else 1, 4 if stage >= 1 else 1, 4 if stage >= 2 else 1]
