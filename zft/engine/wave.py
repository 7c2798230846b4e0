"""Waves: the micro-batches of a wave go through the model's own forward as coroutines that park at unit boundaries.

Gradient accumulation then costs no extra weight traffic: while a unit is unsharded every waiting micro-batch uses it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import greenlet
import torch

from zft.dist import World
from zft.engine.context import TorchContext
from zft.engine.unit import Unit

FINISHED = 2**31
"""What a rank whose micro-batches have all finished proposes as the next unit."""


@dataclass(eq=False)
class MicroBatch:
    """One forward pass of the model, and what it needs on its way."""

    number: int
    """Its index in the step over all ranks; seeds its random stream."""
    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None
    run: Callable[[MicroBatch], Any]
    loss_sum: torch.Tensor | None = None
    result: Any = None
    context: TorchContext | None = None
    waiting_for: Unit | None = None
    error: BaseException | None = None
    coroutine: greenlet.greenlet = field(init=False)

    def __post_init__(self) -> None:
        self.coroutine = greenlet.greenlet(self._body)
        self.coroutine.gr_context = contextvars.copy_context()
        self.coroutine.micro_batch = self

    def _body(self) -> None:
        self.result = self.run(self)

    @property
    def finished(self) -> bool:
        return self.coroutine.dead

    @staticmethod
    def current() -> MicroBatch | None:
        """The micro-batch whose coroutine is running, if any."""
        return getattr(greenlet.getcurrent(), "micro_batch", None)

    def park(self, unit: Unit) -> None:
        """Called inside the coroutine: wait until the unit is unsharded."""
        self.waiting_for = unit
        self.coroutine.parent.switch()
        self.waiting_for = None

    def resume(self, device: torch.device) -> None:
        """Run until the next unit boundary or the end, in this micro-batch's own torch context."""
        outside = TorchContext.capture(device)
        self.context.restore(device)
        self.coroutine.parent = greenlet.getcurrent()
        try:
            self.coroutine.switch()
        finally:
            self.context = TorchContext.capture(device)
            outside.restore(device)

    def abandon(self) -> None:
        """Unwind a coroutine that will not be finished."""
        if self.coroutine and not self.coroutine.dead:
            self.coroutine.throw(greenlet.GreenletExit)


def visits(micro_batches: list[MicroBatch], units: list[Unit], world: World) -> Iterator[tuple[Unit, list[MicroBatch]]]:
    """Yield (unit, the micro-batches to resume while it is unsharded) until all ranks are through.

    The next unit is the earliest that any micro-batch of any rank waits for, so ranks and micro-batches that skip units or
    have no data stay in step. Raises RankError on all ranks when one has failed.
    """
    for micro_batch in micro_batches:
        micro_batch.resume(world.device)
    while True:
        waiting = [mb for mb in micro_batches if not mb.finished]
        mine = min((mb.waiting_for.index for mb in waiting), default=FINISHED)
        chosen = min(row[0] for row in world.gather_ints([mine]))
        if chosen == FINISHED:
            return
        unit = units[chosen]
        yield unit, [mb for mb in waiting if mb.waiting_for is unit]
