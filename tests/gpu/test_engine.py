"""The engine on a GPU equals a plain loop on the CPU, in any placement; device memory stays constant."""

import itertools

import pytest
import torch

from tests.parity.cells import ARCHITECTURES, OPTIMIZERS, batches
from tests.plain import plain_loop
from tests.tiny import tiny_model
from zft.api import Engine
from zft.config import EngineConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TIERS = ("device", "cpu", "nvme")
STEPS = 5
CLOSE = 2e-5
"""Absolute: another device adds up in another order."""


@pytest.fixture(autouse=True)
def full_precision():
    """float32 products without TF32, so that the CPU's loop is a reference."""
    was = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = was


def run(arch: str, folder, steps: int = STEPS, overrides: dict | None = None, **settings) -> tuple[list[float], dict]:
    config = EngineConfig(**{"precision": "fp32", "optim": OPTIMIZERS["adamw"], "nvme_dir": str(folder), **settings})
    with Engine(tiny_model(arch, **(overrides or {})), config) as engine:
        assert engine.world.device.type == "cuda"
        losses = [engine.step(mbs).loss for mbs in batches(3, steps)]
        return losses, dict(engine.named_parameters())


def assert_close_to_plain(arch: str, got: tuple[list[float], dict], overrides: dict | None = None) -> None:
    plain = plain_loop(tiny_model(arch, **(overrides or {})), batches(3, STEPS), OPTIMIZERS["adamw"], "fp32", 1.0)
    assert got[0] == pytest.approx(plain.losses, abs=CLOSE)
    assert max((got[1][n] - w).abs().max().item() for n, w in plain.weights.items()) <= CLOSE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, tmp_path):
    arch, overrides = ARCHITECTURES[name]
    assert_close_to_plain(arch, run(arch, tmp_path / "t", overrides=overrides), overrides)


@pytest.mark.parametrize("activation", ["none", "full", "selective", "offload"])
@pytest.mark.parametrize("wave", [None, 1])
def test_activations_and_waves(activation, wave, tmp_path):
    placed = {"param_tier": "cpu", "state_tier": "cpu", "grad_tier": "cpu"}
    assert_close_to_plain("llama_tied", run("llama_tied", tmp_path / "t", activation=activation, wave=wave, **placed))


@pytest.mark.parametrize("update", [{}, {"max_grad_norm": None, "nonfinite": "raise"}], ids=["forward", "backward"])
@pytest.mark.parametrize("state_tier", TIERS)
def test_placements_agree(state_tier, update, tmp_path):
    """The same update code (by the state's tier) leaves the same bits wherever weights and gradients wait."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for number, (param_tier, grad_tier) in enumerate(itertools.product(TIERS, TIERS)):
        tiers = {"param_tier": param_tier, "state_tier": state_tier, "grad_tier": grad_tier}
        found.append(run("llama", tmp_path / str(number), steps=3, precision="bf16", **tiers, **update))
    torch.use_deterministic_algorithms(False)
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(weights[n], w) for n, w in found[0][1].items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("tier", TIERS)
def test_half_precision_learns_like_the_plain_loop(precision, tier, tmp_path):
    tiers = dict.fromkeys(("param_tier", "state_tier", "grad_tier"), tier)
    losses, _ = run("llama", tmp_path / "t", steps=20, precision=precision, **tiers)
    plain = plain_loop(tiny_model("llama"), batches(3, 20), OPTIMIZERS["adamw"], precision, 1.0)
    assert losses[0] == pytest.approx(plain.losses[0], abs=0.05)
    assert losses[-1] == pytest.approx(plain.losses[-1], abs=0.05 * (plain.losses[0] - plain.losses[-1]))


@pytest.mark.parametrize("tier", TIERS)
def test_device_memory_is_constant_after_the_second_step(tier, tmp_path):
    tiers = dict.fromkeys(("param_tier", "state_tier", "grad_tier"), tier)
    config = EngineConfig(precision="bf16", nvme_dir=str(tmp_path / "t"), **tiers)
    with Engine(tiny_model("llama", num_hidden_layers=4), config) as engine:
        reserved = []
        for mbs in batches(2, 6):
            engine.step(mbs)
            reserved.append(torch.cuda.memory_reserved())
        assert len(set(reserved[1:])) == 1, reserved


def test_a_failed_step_leaves_no_trace(tmp_path):
    tiers = {"param_tier": "cpu", "state_tier": "cpu", "grad_tier": "cpu"}
    data = batches(2, 3)
    expected = run("llama", tmp_path / "a", steps=3, **tiers)
    config = EngineConfig(precision="fp32", optim=OPTIMIZERS["adamw"], **tiers)
    with Engine(tiny_model("llama"), config) as engine:
        losses = []
        for mbs in [*data]:
            with pytest.raises(ValueError, match="on purpose"):
                engine.step(mbs, loss_fn=_raise)
            losses.append(engine.step(batches(3, 1)[0]).loss)
    assert losses == expected[0]


def _raise(model, mb):
    model(**{k: v for k, v in mb.items() if k != "labels"})
    raise ValueError("on purpose")
