"""A disk that fails at a chosen operation of a save: the process dies there, or the disk is full.

The operations are those that zft.checkpoint.disk.Disk has, found by looking, so that a new one is covered.

    with faulty(None) as disk: save()                  # disk.log: every operation of the save, in order
    with faulty(7, "kill"): save()                     # the process ends as by SIGKILL at operation 7
    with faulty(7, "full"): save()                     # operation 7 raises ENOSPC
"""

from __future__ import annotations

import errno
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zft.checkpoint import disk
from zft.tiers.page import PAGE

KILLED = 137
OPERATIONS = [name for name, _ in inspect.getmembers(disk.Disk, inspect.isfunction) if not name.startswith("_")]


class FaultyDisk(disk.Disk):
    """Fails at operation number `at`, counted from 0; a write is half done by then. None: only notes what happens."""

    def __init__(self, at: int | None, kind: str):
        self.at, self.kind = at, kind
        self.log: list[tuple[str, str]] = []
        self._inner = disk.Disk()
        for name in OPERATIONS:
            setattr(self, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Any:
        def operation(*args: Any) -> Any:
            number = len(self.log)
            self.log.append(
                (name, " ".join([_shown(args[0]), *(_shown(arg) for arg in args[1:] if not isinstance(arg, int))]))
            )
            if number == self.at:
                if name == "write":
                    half = len(args[1]) // 2
                    self._inner.write(args[0], args[1][: half // PAGE * PAGE or half], args[2])
                if self.kind == "kill":
                    os._exit(KILLED)
                if name != "close":  # closing frees; it doesn't need room
                    raise OSError(errno.ENOSPC, "No space left on device", _shown(args[0]))
            return getattr(self._inner, name)(*args)

        return operation


@contextmanager
def faulty(at: int | None, kind: str = "kill") -> Iterator[FaultyDisk]:
    """Every save in this block meets the fault."""
    before, disk.DISK = disk.DISK, FaultyDisk(at, kind)
    try:
        yield disk.DISK
    finally:
        disk.DISK = before


def _shown(value: Any) -> str:
    """A path, a descriptor's path, or the size of data."""
    if isinstance(value, memoryview):
        return f"{len(value)} bytes"
    return os.readlink(f"/proc/self/fd/{value}") if isinstance(value, int) and value > 2 else str(value)
