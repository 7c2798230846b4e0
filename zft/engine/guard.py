"""Saving while the next step computes: which records are still to be copied, and the updates that wait for that."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from zft.engine.unit import ParamGroup


class CopyGuard:
    """Lets updates pass, but for those of steps after the one that is being saved, group by group, until it is copied."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.uncopied: set[ParamGroup] = set()
        self.step = 0

    def begin(self, groups: Iterable[ParamGroup], step: int) -> None:
        """The state after optimizer step `step` of these groups is about to be copied."""
        with self.changed:
            assert not self.uncopied, "one save at a time"
            self.uncopied, self.step = set(groups), step

    def copied(self, *groups: ParamGroup) -> None:
        with self.changed:
            self.uncopied.difference_update(groups)
            self.changed.notify_all()

    def end(self) -> None:
        """The save is through, or has failed: nothing waits for it any more."""
        self.copied(*self.uncopied)

    def before_update(self, group: ParamGroup, step: int) -> None:
        """Wait until an update of `step` may change the group's record."""
        with self.changed:
            self.changed.wait_for(lambda: group not in self.uncopied or step <= self.step)
