"""Copies between host and device on side streams, ordered by events. Without CUDA a call is done when it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Recorder = Callable[[str, str, float, float], None]
"""(lane, name, start_s, end_s): a finished piece of work, for the trace."""


def unrecorded(*_: object) -> None:
    """A recorder that keeps nothing."""


@contextmanager
def recorded(recorder: Recorder, lane: str, name: str) -> Iterator[None]:
    """Around work that is done when it returns."""
    started = time.perf_counter()
    yield
    recorder(lane, name, started, time.perf_counter())


class Event:
    """A point on a stream. Holds its copy's tensors until it is dropped, so that neither end is freed too early."""

    __slots__ = ("_event", "_keep")

    def __init__(self, event: torch.cuda.Event | None = None, keep: tuple[torch.Tensor, ...] = ()):
        self._event = event
        self._keep = keep

    def wait_on_compute(self) -> None:
        """Later work on the current stream waits for this point; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """The host waits for this point."""
        if self._event is not None:
            self._event.synchronize()

    def done(self) -> bool:
        return self._event is None or self._event.query()


class Streams:
    """The compute stream (whatever is current), one stream for copies in and one for copies out.

    Nothing here blocks the host but `Event.synchronize`. A copy is asynchronous only from or to pinned memory (Arena).
    `recorder` gets every copy as a span of lane h2d or d2h: with CUDA when `report` is called.
    """

    def __init__(self, device: torch.device | str, recorder: Recorder = unrecorded):
        self.device, self.recorder = torch.device(device), recorder
        self._timed: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._zero: tuple[torch.cuda.Event, float] | None = None
        """A point on the device's clock, and the host's time then."""
        self.is_cuda = self.device.type == "cuda"
        self.h2d = torch.cuda.Stream(self.device) if self.is_cuda else None
        self.d2h = torch.cuda.Stream(self.device) if self.is_cuda else None
        self.collective = torch.cuda.Stream(self.device) if self.is_cuda else None

    def record(self) -> Event:
        """The compute stream's present point: pass it as `after` to a copy that reuses what compute is reading."""
        if not self.is_cuda:
            return Event()
        return Event(torch.cuda.current_stream(self.device).record_event())

    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        """What is enqueued inside runs on the collectives' stream; points recorded inside are points of it."""
        if not self.is_cuda:
            yield
            return
        with torch.cuda.stream(self.collective):
            yield

    def copy_h2d(self, dst: torch.Tensor, src: torch.Tensor, after: Event | None = None, name: str = "") -> Event:
        """dst (device) <- src (host). Starts once `after` is reached; None: at once, so dst must be free already."""
        return self._copy(dst, src, ("h2d", name), after)

    def copy_d2h(self, dst: torch.Tensor, src: torch.Tensor, after: Event | None = None, name: str = "") -> Event:
        """dst (host) <- src (device). Starts once `after` is reached; None: after all compute enqueued so far."""
        return self._copy(dst, src, ("d2h", name), after or self.record())

    def _copy(self, dst: torch.Tensor, src: torch.Tensor, span: tuple[str, str], after: Event | None) -> Event:
        if not self.is_cuda:
            with recorded(self.recorder, *span):
                dst.copy_(src)
            return Event()
        stream = self.h2d if span[0] == "h2d" else self.d2h
        if after is not None and after._event is not None:
            stream.wait_event(after._event)
        if self._zero is None:
            self._zero = (_timing_event(stream), 0.0)
            self._zero[0].synchronize()
            self._zero = (self._zero[0], time.perf_counter())
        with torch.cuda.stream(stream):
            began = _timing_event(stream)
            dst.copy_(src, non_blocking=True)
            ended = _timing_event(stream)
        self._timed.append((*span, began, ended))
        for tensor in (dst, src):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return Event(ended, (dst, src))

    def report(self) -> None:
        """Hand the recorder the copies that have ended since the last call."""
        timed, self._timed = self._timed, []
        for lane, name, began, ended in timed:
            if not ended.query():
                self._timed.append((lane, name, began, ended))
                continue
            start_s, end_s = (self._zero[1] + self._zero[0].elapsed_time(event) / 1e3 for event in (began, ended))
            self.recorder(lane, name, start_s, end_s)

    def join(self) -> None:
        """Later compute waits for every copy enqueued so far (end of a step)."""
        if self.is_cuda:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.h2d)
            current.wait_stream(self.d2h)


def _timing_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    return stream.record_event(torch.cuda.Event(enable_timing=True))
