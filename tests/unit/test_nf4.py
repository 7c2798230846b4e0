"""NF4 against the plainest reference, and against what bitsandbytes made of two weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from zft.models.nf4 import BLOCK, CODES, NF4, PIECE_NUMEL, _decode_by_torch, _parts

BITSANDBYTES = load_file(Path(__file__).parents[1] / "fixtures" / "nf4_bitsandbytes.safetensors")


def packed(values: torch.Tensor) -> torch.Tensor:
    blob = torch.empty(NF4.nbytes(values.numel()), dtype=torch.uint8)
    NF4.encode(values, blob)
    return blob


def unpacked(blob: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(numel, dtype=dtype)
    NF4.decode(blob, out)
    return out


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Each value replaced by the nearest code times its block's largest magnitude, in float64."""
    blocks = values.double().view(-1, BLOCK)
    top = blocks.abs().amax(dim=1, keepdim=True)
    scaled = blocks / top.clamp_min(1e-300)
    codes = torch.tensor(CODES, dtype=torch.float64)
    return (codes[(scaled[..., None] - codes).abs().argmin(dim=-1)] * top).flatten().float()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 2**31))
def test_every_value_becomes_the_nearest_code(blocks, dtype, seed):
    values = torch.randn(2 * BLOCK * blocks, generator=torch.Generator().manual_seed(seed)).to(dtype)
    values[:BLOCK] = 0  # a block without any magnitude
    assert torch.allclose(unpacked(packed(values), values.numel()), nearest(values), rtol=1e-6, atol=0)


def test_pieces_and_dtypes_agree():
    values = torch.randn(PIECE_NUMEL + 6 * BLOCK)
    blob, wide = packed(values), torch.empty(values.numel())
    _decode_by_torch(*_parts(blob, values.numel()), wide)
    assert torch.equal(unpacked(blob, values.numel()), wide)
    assert torch.equal(unpacked(blob, values.numel(), torch.bfloat16), wide.bfloat16())
    assert blob.numel() * 8 == values.numel() * 4.5


def test_a_shard_packs_as_it_does_inside_the_whole():
    """Each rank quantizes its own shard; the codes must not depend on the world size."""
    values = torch.randn(8 * BLOCK)
    halves = torch.cat([unpacked(packed(half), half.numel()) for half in values.chunk(2)])
    assert torch.equal(halves, unpacked(packed(values), values.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_as_bitsandbytes(dtype):
    """Its output is a fixture, made by scripts/make_nf4_fixture.py."""
    name = str(dtype).removeprefix("torch.")
    weight, codes, absmax, back = (BITSANDBYTES[f"{name}.{part}"] for part in ("weight", "codes", "absmax", "back"))
    blob = packed(weight.flatten())
    ours, scales = _parts(blob, weight.numel())
    assert torch.equal(ours, codes) and torch.equal(scales, absmax)
    assert torch.equal(unpacked(blob, weight.numel(), dtype), back.flatten())
