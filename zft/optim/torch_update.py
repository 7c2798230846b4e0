"""The update in torch operations, for records on a GPU. Operation for operation the arithmetic of kernels.py."""

from __future__ import annotations

import torch

from zft.precision import COMPACT_BLOCK, join_master, split_master

_HASH = 2654435761 - (1 << 32)
"""As an int32: products wrap alike."""
_LEAST_SCALE = 1e-28


def adamw(p, g, m, v, factor: float, c) -> None:
    one_b1, b2, one_b2, inv_sqrt_bc2, eps, step_size = map(float, c)
    m.add_((g - m).mul_(one_b1))
    v.mul_(b2).add_((g * one_b2).mul_(g))
    p.mul_(factor).sub_((m * step_size).div_(v.sqrt().mul_(inv_sqrt_bc2).add_(eps)))


def sgd(p, g, m, factor: float, c) -> None:
    lr, momentum = map(float, c)
    m.mul_(momentum).add_(g.add(p * factor))
    p.sub_(m * lr)


def lion(p, g, m, factor: float, c) -> None:
    lr, one_b1, one_b2 = map(float, c)
    drift = g - m
    update = m.add(drift * one_b1)
    p.mul_(factor).sub_(update.sign_().mul_(lr))
    m.add_(drift.mul_(one_b2))


def join8(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """(hi bfloat16, lo int8) -> float32."""
    return ((hi.view(torch.int16).to(torch.int32) << 16) + (lo.to(torch.int32) << 8)).view(torch.float32)


def split8(master: torch.Tensor, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 -> (hi bfloat16, lo int8), rounded by value (kernels.py)."""
    bits = master.view(torch.int32)
    rounded = (bits + (((bits ^ salt) * _HASH >> 24) & 0xFF)) & ~0xFF
    bits = torch.where(torch.isfinite(master), rounded, bits)
    hi, lo = split_master(bits.view(torch.float32))
    return hi, (lo >> 8).to(torch.int8)


def decode8(codes: torch.Tensor, scales: torch.Tensor, levels: float) -> torch.Tensor:
    """codes [n], scales [ceil(n / block)] -> float32 [n]."""
    q = codes.to(torch.float32)
    q2 = q * q
    unit = scales / torch.full_like(scales, levels**4)
    return torch.copysign((q2 * q2).mul_(_spread(unit, q.numel())), q)


def encode8(values: torch.Tensor, levels: float, least: float, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n] -> (codes as float32 [n], scales [ceil(n / block)])."""
    n = values.numel()
    padded = torch.nn.functional.pad(values, (0, -n % COMPACT_BLOCK))
    scales = padded.view(-1, COMPACT_BLOCK).abs().amax(1).clamp_(min=_LEAST_SCALE)
    # scalar / tensor would multiply by a rounded reciprocal
    y = values.abs().mul_(_spread(torch.full_like(scales, levels**4).div_(scales), n))
    q = y.sqrt().sqrt_().floor_()
    q2 = q * q
    q4 = q2 * q2
    r = q + 1
    r2 = r * r
    dither = (((values.view(torch.int32) ^ salt) * _HASH >> 8) & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)
    q = torch.where(dither * (r2 * r2 - q4) < y - q4, r, q)
    q = torch.where((q < least) & (y > 0), least, q)
    return torch.copysign(q, values), scales


def _spread(scales: torch.Tensor, numel: int) -> torch.Tensor:
    return scales.repeat_interleave(COMPACT_BLOCK)[:numel]


def load_weights(views: dict[str, torch.Tensor]) -> torch.Tensor:
    """The float32 master of a record's views: in place for fp32 and fp16, joined otherwise."""
    if "master" in views:
        return views["master"]
    if "lo" not in views:
        return views["hi"]
    return (join8 if views["lo"].dtype == torch.int8 else join_master)(views["hi"], views["lo"])


def store_weights(views: dict[str, torch.Tensor], master: torch.Tensor, salt: int = 0) -> None:
    """Writes `master` into the views, whatever form they have."""
    if "master" in views:
        views["master"].copy_(master)
        views["hi"].copy_(master)
    elif "lo" in views:
        hi, lo = split8(master, salt) if views["lo"].dtype == torch.int8 else split_master(master)
        views["hi"].copy_(hi)
        views["lo"].copy_(lo)
    else:
        views["hi"].copy_(master)


def load_moments(views: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    names = [name for name in ("m", "v") if name in views]
    if "m_scale" not in views:
        return [views[name] for name in names]
    return [decode8(views["m"], views["m_scale"], 127.0), decode8(views["v"], views["v_scale"], 255.0)]


def store_moments(views: dict[str, torch.Tensor], moments: list[torch.Tensor], salt: int) -> None:
    if "m_scale" not in views:
        return  # updated in place
    for name, value, levels, least in zip("mv", moments, (127.0, 255.0), (0.0, 1.0), strict=True):
        codes, scales = encode8(value, levels, least, salt)
        views[name].copy_(codes)
        views[f"{name}_scale"].copy_(scales)
