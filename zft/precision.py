"""Dtypes of a run, the record's fields, the split float32 master and the fp16 loss scaler."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zft.config import AdamW, EngineConfig, Precision, ZftError

COMPACT_BLOCK = 256
"""Elements that share one scale in `adamw_compact`."""


@dataclass(frozen=True)
class Field:
    """One array of a record. `block` elements share one entry (1, or COMPACT_BLOCK for scales)."""

    name: str
    dtype: torch.dtype
    block: int = 1

    @property
    def bytes_per_element(self) -> float:
        return self.dtype.itemsize / self.block

    def entries(self, numel: int) -> int:
        """Entries of this field for `numel` elements of a shard."""
        return -(-numel // self.block)

    def bytes(self, numel: int) -> int:
        return self.entries(numel) * self.dtype.itemsize


@dataclass(frozen=True)
class PrecisionPlan:
    """A run's dtypes. `fields` is a trained element's record in order, `hi` first; `frozen_fields` a frozen one's."""

    precision: Precision
    hi_dtype: torch.dtype
    compute_dtype: torch.dtype
    grad_dtype: torch.dtype
    """Gradients at rest: bfloat16 for bf16, else float32 (fp16's range is for products, not for a sum that waits)."""
    fields: tuple[Field, ...]
    compact: bool = False

    @property
    def frozen_fields(self) -> tuple[Field, ...]:
        return self.fields[:1]

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """All but `hi`: what lives on `state_tier`."""
        return self.fields[1:]

    @property
    def align(self) -> int:
        """Elements; parameters, shards and chunks start at multiples of it."""
        return COMPACT_BLOCK if self.compact else 1


_HI = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16, Precision.fp32: torch.float32}
_COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_precision(config: EngineConfig, device: torch.device | str) -> PrecisionPlan:
    """Fixes the dtypes and the record of a run that computes on `device`.

    Raises ZftError if `compute_dtype` is neither hi's dtype nor float32, or for a compact record that is not bf16.
    """
    precision = Precision.bf16 if config.precision == Precision.auto else Precision(config.precision)
    hi = _HI[precision]
    compact = getattr(config.optim, "compact", False)
    if compact and precision != Precision.bf16:
        raise ZftError(
            f"optimizer=adamw_compact needs precision=bf16, got {precision}; set precision=bf16 or optimizer=adamw"
        )
    if config.compute_dtype == "auto":
        compute = hi if multiplies_fastest(hi, torch.device(device).type) else torch.float32
    elif config.compute_dtype not in _COMPUTE:
        raise ZftError(f"compute_dtype is one of auto, {', '.join(_COMPUTE)}, got {config.compute_dtype}")
    else:
        compute = _COMPUTE[config.compute_dtype]
    if compute not in (hi, torch.float32):
        raise ZftError(
            f"compute_dtype={config.compute_dtype} does not hold precision={precision} weights; "
            f"use auto, float32 or {str(hi).removeprefix('torch.')}"
        )
    grad = torch.bfloat16 if precision == Precision.bf16 else torch.float32
    return PrecisionPlan(precision, hi, compute, grad, _fields(precision, config.optim, compact), compact)


def multiplies_fastest(dtype: torch.dtype, device_type: str) -> bool:
    """Whether matrices of `dtype` multiply faster than float32's there: on a GPU, and bfloat16's on a CPU with AMX tiles."""
    if device_type != "cpu":
        return True
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


def _fields(precision: Precision, optim, compact: bool) -> tuple[Field, ...]:
    weight = {
        Precision.bf16: (Field("hi", torch.bfloat16), Field("lo", torch.int8 if compact else torch.int16)),
        Precision.fp16: (Field("hi", torch.float16), Field("master", torch.float32)),
        Precision.fp32: (Field("hi", torch.float32),),
    }[precision]
    if compact:
        scales = (Field("m_scale", torch.float32, COMPACT_BLOCK), Field("v_scale", torch.float32, COMPACT_BLOCK))
        return (*weight, Field("m", torch.int8), Field("v", torch.uint8), *scales)
    moments = ("m", "v") if isinstance(optim, AdamW) else ("m",)
    return weight + tuple(Field(name, torch.float32) for name in moments)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 -> (hi bfloat16, lo int16), same shape: bits(master) == (bits(hi) << 16) + lo.

    hi is the nearest bfloat16, ties away from zero. Any NaN becomes the canonical quiet NaN, so that hi shows it.
    """
    assert master.dtype == torch.float32, f"a master is float32, got {master.dtype}"
    bits = master.contiguous().view(torch.int32)
    bits = torch.where(torch.isnan(master), 0x7FC00000, bits)
    # the arithmetic shift and the int16 casts wrap; only the low 16 bits of each matter
    hi = ((bits + 0x8000) >> 16).to(torch.int16)
    lo = (bits - (hi.to(torch.int32) << 16)).to(torch.int16)
    return hi.view(torch.bfloat16), lo


def join_master(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """(hi bfloat16, lo int16) -> the exact float32 master, same shape."""
    bits = (hi.contiguous().view(torch.int16).to(torch.int32) << 16) + lo
    return bits.view(torch.float32)


class LossScaler:
    """Dynamic loss scale for fp16.

    An overflow first uses up hysteresis, then halves the scale; `window` good steps in a row double it and refill the
    hysteresis; an overflow at the floor with no hysteresis left raises. Source: DeepSpeed's `DynamicLossScaler`
    (deepspeed/runtime/fp16/loss_scaler.py) with its defaults and consecutive_hysteresis off.
    """

    def __init__(self, scale: float = 2.0**16, window: int = 1000, hysteresis: int = 2, floor: float = 1.0):
        self.scale = float(scale)
        self.window = window
        self.hysteresis = hysteresis
        self.floor = floor
        self._left = hysteresis
        self._good_steps = 0

    def update(self, overflow: bool) -> None:
        """Call once a step, after the global norm is known. Raises FloatingPointError at the floor."""
        if not overflow:
            self._good_steps += 1
            if self._good_steps % self.window == 0:
                self.scale *= 2.0
                self._left = self.hysteresis
            return
        self._good_steps = 0
        if self._left > 1:
            self._left -= 1
            return
        if self.scale <= self.floor:
            raise FloatingPointError(
                f"gradients overflow at the lowest loss scale {self.floor:g}; "
                "use precision=bf16, or lower the learning rate"
            )
        self.scale = max(self.scale / 2.0, self.floor)

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "hysteresis_left": self._left, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale = float(state["scale"])
        self._left = int(state["hysteresis_left"])
        self._good_steps = int(state["good_steps"])
