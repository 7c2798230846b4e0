"""Cases f: mixed precision. The reference is a plain loop with float32 masters, or the plain transformers model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.adapters import method
from tests.cases.shares import apart, config, on_ranks, rows
from tests.harness import run_ranks
from tests.plain import plain_loop
from tests.tiny import tiny_folder, tiny_model
from zft.api import Engine
from zft.config import SGD, AdamW, Lion
from zft.precision import resolve_precision

# 47: a model that is stored in float16


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_47_float16_model_trains_on_float32_masters(stored, frozen, tmp_path):
    """What is trained of a float16 model has float32 masters and gradients by itself.

    It clips and steps as a plain loop with masters does; frozen weights have none.
    """
    base = tiny_folder("llama", tmp_path / "base", dtype=stored)
    models = [AutoModelForCausalLM.from_pretrained(base, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    for model in models:
        model.model.layers[0].requires_grad_(not frozen)
    if stored is not torch.float16:  # the engine takes what it is given: float16
        models[1].load_state_dict({k: v.float() for k, v in models[0].state_dict().items()})
    steps = [rows(3, 5), rows(4)]
    optim = AdamW(lr=1e-2, eps=1e-3)
    plain = plain_loop(models[1], steps, optim, "fp16", max_grad_norm=0.5)
    with Engine(models[0], config(precision="fp16", max_grad_norm=0.5, optim=optim)) as engine:
        for group, record in engine.parts.records.items():
            assert record.slabs.keys() == ({"hi", "master", "m", "v", "grad"} if group.trainable else {"hi"})
            if group.trainable:
                assert record.slabs["master"].dtype == record.slabs["grad"].dtype == torch.float32
        results = [engine.step(step) for step in steps]
        named = {name: tensor for name, tensor in engine.named_parameters() if name in plain.weights}
    assert [r.loss for r in results] == pytest.approx(plain.losses, abs=5e-6)
    assert [r.grad_norm for r in results] == pytest.approx(plain.norms, abs=1e-5) and min(plain.norms) > 0.5
    assert apart(named, plain.weights) <= 5e-6


def test_47_float16_adapter_trains_on_float32_masters(tmp_path):
    """An adapter on a float16 base has float32 masters, too, and float16 products do not keep it from stepping."""
    base = tiny_folder("llama", tmp_path / "base", dtype=torch.float16)
    settings = config(precision="fp16", compute_dtype="float16")
    with Engine.from_pretrained(base, settings, method=method()) as engine:
        before = dict(engine.named_parameters())
        done = [engine.step(rows(3, 5)) for _ in range(3)]
        after = dict(engine.named_parameters())
    assert not all(result.skipped for result in done)
    moved = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    assert len(moved) == 28 and all("lora_" in name for name in moved)


# 49: a norm that is not finite


class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.value, None


def spoiling(value: float) -> Callable:
    def loss(model, mb):
        return Spoilt.apply(model(input_ids=mb["input_ids"]).logits.square().mean(), value), 1.0

    return loss


def skips(settings: dict, value: float, failing: int) -> dict[str, Any]:
    """On each rank: a good step, one whose gradient is `value` on one rank, a good one; and the two good ones alone."""
    rank, size, found = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), {}
    shares = [step[rank::size] for step in (rows(*[3] * size), rows(*[5] * size), rows(*[2] * size))]
    for bad in (True, False):
        with Engine(tiny_model("llama"), config(**settings)) as engine:
            engine.step(shares[0])
            if bad:
                before = dict(engine.named_parameters())
                result = engine.step(shares[1], loss_fn=spoiling(value if rank == failing else 1.0))
                found["same"] = all(torch.equal(before[name], tensor) for name, tensor in engine.named_parameters())
                found |= {"skipped": result.skipped, "norm": result.grad_norm, "loss": result.loss}
            engine.step(shares[2])
            weights = dict(engine.named_parameters())
            found["finite"] = all(bool(tensor.isfinite().all()) for tensor in weights.values())
            found[bad] = {name: tensor.numpy() for name, tensor in weights.items()}
    return found


@pytest.mark.parametrize(
    ("size", "value", "settings"),
    [
        (1, float("inf"), {}),
        (2, float("inf"), {}),
        (3, float("nan"), {"stage": 1}),
        (2, float("nan"), {"precision": "bf16", "param_tier": "cpu", "grad_tier": "cpu"}),
        (2, float("inf"), {"stage": 0, "precision": "fp16"}),
        (1, float("-inf"), {"max_grad_norm": None}),
    ],
    ids=str,
)
def test_49_infinite_norm_skips_the_step_everywhere(size, value, settings):
    """A norm of inf or NaN on one rank skips the step on all: weights and moments are as if it had not been."""
    for found in run_ranks(size, skips, settings, value, size - 1):
        assert found["skipped"] and found["same"] and found["finite"]
        assert not torch.tensor(found["norm"]).isfinite()
        assert all((found[True][name] == tensor).all() for name, tensor in found[False].items())


# 50: what is logged


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "mixtral"])
@pytest.mark.parametrize("settings", [{}, {"stage": 1}, {"stage": 0}], ids=str)
def test_50_logged_norm_is_global_and_before_clipping(arch, settings):
    """The logged norm is global, before clipping, a tied matrix counted once, the same at any world size.

    The update is clipped.
    """
    parts, optim = rows(3, 7, 2, 9, 4, 6), SGD(lr=1.0, momentum=0.0)
    if arch == "mixtral":
        # its router's loss is one for each micro-batch: the reference takes the same micro-batches
        parts = parts[:3]
    plain = plain_loop(tiny_model(arch), [parts], optim, max_grad_norm=0.01)
    before = {name: p.detach() for name, p in tiny_model(arch).named_parameters()}
    for size in (1, 2, 3):
        found = on_ranks([parts[rank::size] for rank in range(size)], arch, max_grad_norm=0.01, optim=optim, **settings)
        assert found["norm"] == pytest.approx(plain.norms[0], abs=1e-5) and found["norm"] > 0.01
        moved = sum((found["weights"][name] - tensor).double().square().sum() for name, tensor in before.items()) ** 0.5
        assert float(moved) == pytest.approx(0.01, rel=1e-3)


# 51: small steps


class Still(nn.Module):
    """Weights whose gradient is always 1."""

    def __init__(self, numel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, input_ids):
        return self.weight.sum()


def total(model, mb) -> tuple[torch.Tensor, float]:
    return model(**mb), 1.0


@pytest.mark.parametrize("numel", [1, 3, 300])
@pytest.mark.parametrize(
    "optim", [SGD(lr=6e-4, momentum=0.0), AdamW(lr=6e-4), Lion(lr=6e-4), AdamW(lr=6e-4, compact=True)]
)
def test_51_small_steps_are_not_lost_in_bf16(numel, optim):
    """A hundred steps of -6e-4 take a weight from 1.0 to 0.94, whose nearest bf16 computes; bf16 alone would stay at 1.0."""
    bare = torch.ones(numel, dtype=torch.bfloat16)
    for _ in range(100):
        bare -= 6e-4
    assert (bare == 1.0).all()
    with Engine(Still(numel), config(precision="bf16", max_grad_norm=None, optim=optim)) as engine:
        for _ in range(100):
            engine.step([{"input_ids": torch.zeros(1, 1, dtype=torch.int64)}], loss_fn=total)
        [(_, master)] = engine.named_parameters()
        [computing] = [unit["weight"].clone() for unit in engine.stream_units() if "weight" in unit]
    exact = not getattr(optim, "compact", False)
    assert (master - 0.94).abs().max() <= (1e-5 if exact else 1e-3)
    assert computing.dtype == torch.bfloat16 and (computing == 0.94140625).all()


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("optim", [SGD(), AdamW(), Lion()])
def test_51_no_precision_is_without_masters(precision, optim):
    """There is no setting that trains half-precision weights without the rest of their float32 master."""
    fields = {
        field.name: field.dtype for field in resolve_precision(config(precision=precision, optim=optim), "cpu").fields
    }
    if fields["hi"] is not torch.float32:
        assert fields.get("lo") is torch.int16 or fields.get("master") is torch.float32


# 53: routers


def chosen(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Filled with (router, experts chosen) as the model runs."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("router"):
            module.register_forward_hook(
                lambda _m, _a, out, name=name: found.append((name, out[-1].sort(-1).values.clone()))
            )
    return found


@pytest.mark.parametrize("arch", ["qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_53_router_chooses_as_the_plain_model(arch, dtype, tmp_path):
    """In the same dtype each token goes to the experts that the plain model chooses.

    In evaluation, forward pass and recompute; gradients are finite.
    """
    base = tiny_folder(arch, tmp_path / "base", dtype=dtype)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    expected = chosen(plain)
    parts = rows(9, 9, 9, 9, length=16)
    with torch.no_grad():
        for part in parts:
            plain(input_ids=part["input_ids"], attention_mask=part["attention_mask"], use_cache=False)
    precision = "fp16" if dtype is torch.float16 else "bf16"
    settings = config(precision=precision, compute_dtype=str(dtype).removeprefix("torch."), optim=SGD(lr=0.0))
    with Engine.from_pretrained(base, settings) as engine:
        found = chosen(engine.model)
        for part in parts:
            engine.evaluate([part])
        assert len(found) == len(expected) > 0
        for (name, ours), (other, theirs) in zip(found, expected, strict=True):
            assert name == other and torch.equal(ours, theirs), name
        found.clear()
        results = [engine.step([part]) for part in parts]
        assert len(found) == 2 * len(expected), "forward pass and recompute"
        theirs = {(name, tuple(experts.flatten().tolist())) for name, experts in expected}
        assert {(name, tuple(experts.flatten().tolist())) for name, experts in found} == theirs
    assert all(torch.tensor(result.loss).isfinite() for result in results)
    assert not any(result.skipped for result in results[2:]), "the loss scale has settled"
