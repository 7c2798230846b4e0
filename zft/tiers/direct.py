"""Files past the page cache, at any offset: whole pages go straight to and from the disk, the ends of a run through the cache.

A checkpoint or an export is written once and seldom read again: pages kept for it would push out those of others, and
filling them costs more than the disk does. Where a filesystem has no direct I/O everything goes through the cache.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from zft.tiers.claim import fcntl
from zft.tiers.page import PAGE, page_buffer, round_up

BUFFER_BYTES = 16 << 20
"""A multiple of PAGE."""
Store = Callable[[int, memoryview, int], None]
"""(descriptor, bytes, offset in the file): writes all of them, or raises OSError."""


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """All of `data` at `offset` of the file."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _buffer(nbytes: int) -> np.ndarray:
    return np.frombuffer(page_buffer(nbytes), dtype=np.uint8)


class WriteBehind:
    """Runs of bytes for files, written by a thread while the next ones are gathered; `flush` when all are given.

    Bytes that follow on from those before them, in the same file, are one run. An error of the thread is raised by a later
    `write` or by `flush`. Nothing is durable before an fsync.
    """

    def __init__(self, store: Store = write_all):
        self._store = store
        self._buffer, self._other = (_buffer(BUFFER_BYTES) for _ in range(2))
        self._thread = ThreadPoolExecutor(1, "zft-write")
        self._writing: Future | None = None
        self._fd, self._start, self._end = -1, 0, 0

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """The bytes are copied: `data` may change afterwards."""
        if not len(data):
            return
        source = np.frombuffer(data, dtype=np.uint8)
        if (fd, offset) != (self._fd, self._end):
            self._hand_over()
            self._fd, self._start, self._end = fd, offset, offset
        while len(source):
            at = self._end - self._base
            part = source[: len(self._buffer) - at]
            self._buffer[at : at + len(part)] = part
            self._end += len(part)
            source = source[len(part) :]
            if self._end == self._base + len(self._buffer):
                self._hand_over()

    def flush(self) -> None:
        """Returns when everything given is in the files."""
        self._hand_over()
        self._wait()

    def close(self) -> None:
        """Ends the thread; what was not flushed may be lost."""
        self._thread.shutdown(cancel_futures=True)

    @property
    def _base(self) -> int:
        """Where in the file the buffer begins: memory and file are aligned alike."""
        return self._start // PAGE * PAGE

    def _hand_over(self) -> None:
        if self._start == self._end:
            return
        self._wait()  # for the other buffer
        filled = memoryview(self._buffer)[self._start - self._base : self._end - self._base]
        self._writing = self._thread.submit(self._write_run, self._fd, filled, self._start)
        self._buffer, self._other = self._other, self._buffer
        self._start = self._end

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write_run(self, fd: int, data: memoryview, offset: int) -> None:
        """A first part up to a page's start, whole pages, the rest."""
        first = min(round_up(offset) - offset, len(data))
        last = max(first, (offset + len(data)) // PAGE * PAGE - offset)
        if first:
            self._store(fd, data[:first], offset)
        if last > first and not self._write_pages(fd, data[first:last], offset + first):
            self._store(fd, data[first:last], offset + first)
        if last < len(data):
            self._store(fd, data[last:], offset + last)

    def _write_pages(self, fd: int, data: memoryview, offset: int) -> bool:
        """False where the filesystem refuses: some take the flag and then not the transfer."""
        if not set_direct(fd, True):
            return False
        try:
            self._store(fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            set_direct(fd, False)
        return True


READS = 4
"""Requests of a reader in flight; each has its share of BUFFER_BYTES."""


class Reader:
    """Reads files, each past the page cache if its descriptor was set so, with several requests in flight. Not thread-safe."""

    def __init__(self) -> None:
        self._buffers = [_buffer(max(BUFFER_BYTES // READS, PAGE)) for _ in range(READS)]
        self._threads = ThreadPoolExecutor(READS, "zft-read")  # they end with the reader

    def read(self, fd: int, offset: int, out: memoryview) -> int:
        """Fills `out` from `offset` on; fewer bytes than asked for only where the file ends. Returns how many."""
        target, done, skipped = np.frombuffer(out, dtype=np.uint8), 0, offset % PAGE
        for block in self._blocks(fd, offset - skipped, round_up(offset + len(target))):
            part = block[skipped : skipped + len(target) - done]
            target[done : done + len(part)] = part
            done, skipped = done + len(part), 0
        return done

    def blocks(self, fd: int) -> Iterator[memoryview]:
        """The whole file, a buffer at a time; each valid until the next."""
        yield from map(memoryview, self._blocks(fd, 0, os.fstat(fd).st_size))

    def _blocks(self, fd: int, start: int, end: int) -> Iterator[np.ndarray]:
        """[start, end) of the file, or what there is of it; `start` at a page. Only the last block may be short."""
        size = len(self._buffers[0])
        starts = range(start, end, size)
        asked: deque[Future] = deque()
        try:
            for number in range(len(starts) + READS - 1):
                if number >= READS - 1:  # one buffer is with the caller
                    block = asked.popleft().result()
                    yield block
                    if len(block) < size:
                        return
                if number < len(starts):
                    buffer = self._buffers[number % READS][: round_up(min(size, end - starts[number]))]
                    asked.append(self._threads.submit(_fill, fd, starts[number], buffer))
        finally:
            wait(asked)  # nobody writes into a buffer that is used again


def _fill(fd: int, offset: int, buffer: np.ndarray) -> np.ndarray:
    """The buffer's part that the file has: all of it, but at the file's end."""
    done, refused = 0, False
    while done < len(buffer):
        try:
            got = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or refused:
                raise
            refused = True  # some filesystems take the flag and then not the transfer
            set_direct(fd, False)
            continue
        done += got
        if got % PAGE or got == 0:  # the file ends
            break
    return buffer[:done]


def set_direct(fd: int, on: bool) -> bool:
    """Let the descriptor's next requests go past the page cache, or no longer. False where that cannot be chosen."""
    if fcntl is None or not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
