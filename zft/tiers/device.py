"""Copies between host and device on side streams, ordered by events. Without CUDA a call is done when it returns."""

from __future__ import annotations

import torch


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
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.h2d = torch.cuda.Stream(self.device) if self.is_cuda else None
        self.d2h = torch.cuda.Stream(self.device) if self.is_cuda else None

    def record(self) -> Event:
        """The compute stream's present point: pass it as `after` to a copy that reuses what compute is reading."""
        if not self.is_cuda:
            return Event()
        return Event(torch.cuda.current_stream(self.device).record_event())

    def copy_h2d(self, dst: torch.Tensor, src: torch.Tensor, after: Event | None = None) -> Event:
        """dst (device) <- src (host). Starts once `after` is reached; None: at once, so dst must be free already."""
        return self._copy(dst, src, self.h2d, after)

    def copy_d2h(self, dst: torch.Tensor, src: torch.Tensor, after: Event | None = None) -> Event:
        """dst (host) <- src (device). Starts once `after` is reached; None: after all compute enqueued so far."""
        return self._copy(dst, src, self.d2h, after or self.record())

    def _copy(self, dst: torch.Tensor, src: torch.Tensor, stream, after: Event | None) -> Event:
        if not self.is_cuda:
            dst.copy_(src)
            return Event()
        if after is not None and after._event is not None:
            stream.wait_event(after._event)
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
        for tensor in (dst, src):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return Event(stream.record_event(), (dst, src))

    def join(self) -> None:
        """Later compute waits for every copy enqueued so far (end of a step)."""
        if self.is_cuda:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.h2d)
            current.wait_stream(self.d2h)
