"""All that a run must remember to go on, beside what the engine keeps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field


@dataclass
class TrainState:
    """Saved with every checkpoint, as plain data."""

    step: int = 0
    """Steps done, skipped ones too; the engine counts updates."""
    tokens: int = 0
    """Supervised tokens seen, on all ranks."""
    skipped: int = 0
    """Steps whose gradient norm was not finite."""
    seconds: float = 0.0
    """Time spent in steps."""
    loss: float = math.nan
    """Of the last step."""
    best_loss: float = math.inf
    """The lowest evaluation loss."""
    best_step: int | None = None
    eval_step: int | None = None
    """The last step that was evaluated, and its loss."""
    eval_loss: float | None = None
    saved: list = field(default_factory=list)
    """[step, evaluation loss of that step or None] of the checkpoints that this run has written and kept."""
    total_steps: int = 0
    """Length of the schedule."""
    loader: dict = field(default_factory=dict)
    """Position in the data."""
    stop_ids: list = field(default_factory=list)
    """Tokens that end an answer in the data: an export made from a checkpoint needs them, too."""

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict) -> TrainState:
        return TrainState(**values)

    @property
    def is_finished(self) -> bool:
        return 0 < self.total_steps <= self.step
