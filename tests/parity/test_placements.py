"""Bits that must not depend on where things live, and half-precision computation."""

import itertools
import math

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cells import batches, digest_of
from tests.plain import plain_loop
from tests.tiny import tiny_model
from zft.api import Engine
from zft.config import AdamW, EngineConfig, Lion, Tier

TIERS = [tier.value for tier in Tier]
OPTIMS = {"adamw": AdamW(lr=1e-2), "compact": AdamW(lr=1e-2, compact=True), "lion": Lion(lr=1e-3)}


def bits(config: EngineConfig, arch: str = "llama_tied") -> tuple[list[float], list[float], str]:
    """(losses, norms, digest of all records) after three steps."""
    with Engine(tiny_model(arch), config) as engine:
        results = [engine.step(mbs) for mbs in batches(2, 3)]
        engine.drain()
        return [r.loss for r in results], [r.grad_norm for r in results], digest_of(engine)


@pytest.mark.parametrize("optimizer", OPTIMS)
@pytest.mark.parametrize("wave", [None, 1])
def test_all_27_placements_leave_the_same_bits(optimizer, wave, tmp_path):
    found = set()
    for number, (param, state, grad) in enumerate(itertools.product(TIERS, repeat=3)):
        config = EngineConfig(param_tier=param, state_tier=state, grad_tier=grad, nvme_dir=str(tmp_path / str(number)),
                              optim=OPTIMS[optimizer], wave=wave)  # fmt: skip
        losses, norms, digest = bits(config)
        found.add((*losses, *norms, digest))
    assert len(found) == 1


def test_neither_the_number_of_threads_nor_when_updates_run_changes_a_bit(tmp_path):
    tiers = {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"}
    found = [
        bits(
            EngineConfig(
                nvme_dir=str(tmp_path / f"{number}"), max_grad_norm=None, optim=OPTIMS["adamw"], **tiers, **settings
            )
        )
        for number, settings in enumerate(
            [{}, {"update_threads": 1}, {"update_threads": 5, "nvme_threads": 1}, {"nonfinite": "raise"}]
        )
    ]
    assert found[0] == found[1] == found[2] == found[3]


def test_a_run_repeats_itself():
    assert bits(EngineConfig()) == bits(EngineConfig())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_computing_in_half_precision(precision):
    """compute_dtype as the record's: no plain loop has the same rounding, the losses stay close."""
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    optim = AdamW(lr=1e-2, eps=1e-3)
    plain = plain_loop(tiny_model("llama"), batches(2, 20), optim, precision, 1.0)
    config = EngineConfig(precision=precision, compute_dtype=dtype, optim=optim)
    with Engine(tiny_model("llama"), config) as engine:
        assert {g.compute_dtype for g in engine.parts.records} == {getattr(torch, dtype)}
        losses = [engine.step(mbs).loss for mbs in batches(2, 20)]
    assert losses[0] == pytest.approx(plain.losses[0], abs=2e-2)
    assert losses[-1] == pytest.approx(plain.losses[-1], abs=0.05 * (plain.losses[0] - plain.losses[-1]))


def test_gradients_in_half_precision_equal_torch_s_own(tmp_path):
    """The same model in bfloat16, one micro-batch: torch's own bfloat16 gradients, to a rounding."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    (mb,) = batches(1, 1)[0]
    tokens = int((mb["labels"][:, 1:] != -100).sum())
    out = model.train()(**{k: v for k, v in mb.items() if k != "labels"}, use_cache=False)
    loss = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].float().flatten(0, 1), mb["labels"][:, 1:].flatten(), reduction="sum"
    )
    (loss / tokens).backward()
    expected = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    with Engine(tiny_model("llama", dtype=torch.bfloat16), EngineConfig(compute_dtype="bfloat16")) as engine:
        assert engine.step([mb]).grad_norm == pytest.approx(expected, rel=5e-3)


def reduced(dtype: str) -> list[float]:
    import os

    rank = int(os.environ["RANK"])
    with Engine(tiny_model("llama"), EngineConfig(reduce_dtype=dtype, compute_dtype="float32", optim=AdamW(lr=1e-2, eps=1e-3))) as engine:
        return [engine.step(mbs[rank::2]).loss for mbs in batches(2, 10)]


def test_reducing_in_bfloat16_stays_close():
    exact, coarse = run_ranks(2, reduced, "float32")[0], run_ranks(2, reduced, "bfloat16")[0]
    assert coarse[0] == exact[0] and coarse[-1] != exact[-1]
    assert coarse[-1] == pytest.approx(exact[-1], abs=0.02 * (exact[0] - exact[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["full", "none"])
def test_a_compiled_unit_equals_the_plain_loop(activation):
    optim = AdamW(lr=1e-2, eps=1e-3)
    plain = plain_loop(tiny_model("llama"), batches(2, 3), optim, "fp32", 1.0)
    config = EngineConfig(precision="fp32", compile=True, activation=activation, optim=optim)
    with Engine(tiny_model("llama"), config) as engine:
        assert [engine.step(mbs).loss for mbs in batches(2, 3)] == pytest.approx(plain.losses, abs=1e-5)
        weights = dict(engine.named_parameters())
    assert max((weights[n] - w).abs().max().item() for n, w in plain.weights.items()) <= 1e-5
