"""The split master against exact arithmetic on bit patterns, and the dtypes of each precision."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zft.config import SGD, AdamW, EngineConfig, Lion, ZftError
from zft.precision import join_master, resolve_precision, split_master


def floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits_of(tensor: torch.Tensor) -> list[int]:
    size = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(size).flatten().to(torch.int64).tolist()


def every_exponent() -> torch.Tensor:
    """Both signs, all exponents (zero, denormal, normal, infinite), mantissas around each rounding edge."""
    low = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]
    top = [0, 1, 2, 0x3F, 0x40, 0x7E, 0x7F]
    patterns = [(s << 31) | (e << 23) | (t << 16) | b for s in (0, 1) for e in range(256) for t in top for b in low]
    values = floats(patterns)
    return values[~values.isnan()]


def nearest_away(value: float) -> float:
    """The nearest bfloat16 to a finite float32, ties away from zero, by exact comparison with its neighbours."""
    magnitude = bits_of(torch.tensor([abs(value)]))[0] >> 16
    below, above = (floats([(magnitude + k) << 16])[0].item() for k in (0, 1))
    exact = Fraction(abs(value))
    # the step above the largest finite bfloat16 is 2^128 for rounding, infinity in the result
    upper = Fraction(2) ** 128 if above == float("inf") else Fraction(above)
    chosen = below if exact - Fraction(below) < upper - exact else above
    return -chosen if value < 0 else chosen


def test_identity_of_bits_for_every_exponent():
    master = every_exponent()
    hi, lo = split_master(master)
    assert hi.dtype == torch.bfloat16 and lo.dtype == torch.int16
    for m, h, low in zip(bits_of(master), bits_of(hi), lo.tolist(), strict=True):
        assert (m - ((h << 16) + low)) % 2**32 == 0
    assert bits_of(join_master(hi, lo)) == bits_of(master)


def test_hi_is_the_nearest_bfloat16_ties_away_from_zero():
    master = every_exponent()
    master = master[master.isfinite()]
    for value, hi in zip(master.tolist(), split_master(master)[0].float().tolist(), strict=True):
        assert hi == nearest_away(value), value.hex()
    assert split_master(floats([0x3F808000]))[0].item() == 1.0078125  # a tie; to even it would be 1.0
    assert split_master(floats([0xBF808000]))[0].item() == -1.0078125


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_bits_round_trip(patterns):
    master = floats(patterns)
    joined = join_master(*split_master(master))
    nan = master.isnan()
    assert bits_of(joined[~nan]) == bits_of(master[~nan])
    assert split_master(master)[0].isnan().equal(nan), "hi shows a NaN, whatever its payload"


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (7, 1, 3)])
def test_shapes_and_strides(shape):
    master = torch.randn(shape)
    hi, lo = split_master(master)
    assert hi.shape == lo.shape == master.shape and torch.equal(join_master(hi, lo), master)
    if master.dim() > 1:
        assert torch.equal(join_master(*split_master(master.transpose(0, 1))), master.transpose(0, 1))


def test_bfloat16_weights_have_no_residual():
    weights = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weights = weights[~weights.isnan()]
    hi, lo = split_master(weights.float())
    assert bits_of(hi) == bits_of(weights) and not lo.any()


def names(plan) -> list[str]:
    return [f.name for f in plan.fields]


@pytest.mark.parametrize(
    ("precision", "optim", "fields", "bytes_each"),
    [
        ("auto", AdamW(), ["hi", "lo", "m", "v"], 12),
        ("bf16", AdamW(), ["hi", "lo", "m", "v"], 12),
        ("fp32", AdamW(), ["hi", "m", "v"], 12),
        ("fp16", AdamW(), ["hi", "master", "m", "v"], 14),
        ("bf16", AdamW(compact=True), ["hi", "lo", "m", "v", "m_scale", "v_scale"], 5 + 8 / 256),
        ("bf16", SGD(), ["hi", "lo", "m"], 8),
        ("fp32", Lion(), ["hi", "m"], 8),
    ],
)
def test_records(precision, optim, fields, bytes_each):
    plan = resolve_precision(EngineConfig(precision=precision, optim=optim), "cpu")
    assert names(plan) == fields
    assert sum(f.bytes_per_element for f in plan.fields) == bytes_each
    assert [f.name for f in plan.frozen_fields] == ["hi"] and plan.state_fields == plan.fields[1:]
    assert plan.fields[0].dtype == plan.hi_dtype
    assert sum(f.bytes(513) for f in plan.fields[:1]) == 513 * plan.hi_dtype.itemsize
    assert all(f.entries(513) == (3 if "scale" in f.name else 513) for f in plan.fields)


@pytest.mark.parametrize(
    ("precision", "asked", "device", "compute"),
    [
        ("bf16", "auto", "cuda", torch.bfloat16),
        ("bf16", "float32", "cpu", torch.float32),
        ("fp16", "auto", "cpu", torch.float32),
        ("bf16", "bfloat16", "cpu", torch.bfloat16),
        ("fp16", "auto", "cuda:1", torch.float16),
        ("fp16", "float32", "cuda", torch.float32),
        ("fp32", "auto", "cuda", torch.float32),
    ],
)
def test_compute_dtype(precision, asked, device, compute):
    plan = resolve_precision(EngineConfig(precision=precision, compute_dtype=asked), device)
    assert plan.compute_dtype == compute
    assert plan.grad_dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


@pytest.mark.parametrize(("tiles", "compute"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_cpu_computes_in_what_it_multiplies_fastest(monkeypatch, tiles, compute):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert resolve_precision(EngineConfig(precision="bf16"), "cpu").compute_dtype == compute
    assert resolve_precision(EngineConfig(precision="fp32"), "cpu").compute_dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(precision="bf16", compute_dtype="float16"), "not hold precision=bf16 weights; use auto, float32"),
        (EngineConfig(precision="fp32", compute_dtype="bfloat16"), "does not hold precision=fp32"),
        (EngineConfig(compute_dtype="double"), "one of auto, float32, bfloat16, float16, got double"),
        (EngineConfig(precision="fp16", optim=AdamW(compact=True)), "needs precision=bf16, got fp16"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(ZftError, match=message):
        resolve_precision(config, "cpu")
