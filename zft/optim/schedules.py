"""Learning rate of each optimizer step: pure functions of the step, as transformers' get_scheduler computes them."""

from __future__ import annotations

import math

from zft.config import ZftError

WSD_DECAY_SHARE = 0.2
"""Share of total_steps that wsd spends decaying."""
SCHEDULES = ("constant", "linear", "cosine", "wsd")


def lr_at(
    step: int, schedule: str, base_lr: float, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0
) -> float:
    """Learning rate of update `step` = 0, 1, ... (the updates done so far; skipped steps don't count).

    Warm-up: step / warmup_steps * base_lr, so base_lr is first used by update `warmup_steps`. Then to min_lr_ratio *
    base_lr, reached at step = total_steps, that is after the last update: linear over 10 updates uses 1.0, 0.9 ... 0.1
    times base_lr, and lr_at(10) is 0. wsd (warm-up, stable, decay) holds base_lr and decays linearly in the last
    WSD_DECAY_SHARE of total_steps. Raises ZftError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ZftError(f"schedule is one of {', '.join(SCHEDULES)}, got {schedule}")
    if step < warmup_steps:
        return base_lr * step / warmup_steps
    if schedule == "constant":
        return base_lr
    decay_start = warmup_steps
    if schedule == "wsd":
        decay_start = max(warmup_steps, total_steps - max(1, round(total_steps * WSD_DECAY_SHARE)))
    progress = 1.0 if step >= total_steps else max(0.0, (step - decay_start) / (total_steps - decay_start))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return base_lr * (min_lr_ratio + (1.0 - min_lr_ratio) * left)
