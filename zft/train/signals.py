"""Ctrl-C and SIGTERM: the first asks the loop to save and stop after its step, the second ends the process at once."""

from __future__ import annotations

import os
import signal

from zft.status import STOPPED


class StopRequest:
    """As a context: catches SIGINT and SIGTERM. `received` tells whether one came."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self.received:
            os._exit(STOPPED)
        self.received = True
        print("stopping after this step; once more ends at once", flush=True)
