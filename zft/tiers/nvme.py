"""The NVMe tier: preallocated files in a run-owned folder, read and written page-aligned by a small thread pool."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from zft.config import ZftError
from zft.tiers import claim
from zft.tiers.cpu import aligned_empty
from zft.tiers.device import Recorder, recorded, unrecorded
from zft.tiers.disk import allocate, direct_works, file_name, in_memory
from zft.tiers.page import PAGE, round_up

PIECE_BYTES = 8 << 20
"""A request is split into pieces of at most this size, so that one large request keeps several in flight."""
_THREAD_NAME = "zft-nvme"
_warned_buffered: set[str] = set()


class NvmeFolder:
    """This rank's files under `path`, owned until close(): locked against other runs, deleted at the end.

    `preadv` and `pwritev` take (fd, buffers, offset) like their namesakes in `os`; tests pass failing ones.
    `recorder` gets the transfers as spans of lanes "nvme read" and "nvme write", by the files' names.
    Raises ZftError if the folder cannot be created, written or is in use, and on Windows.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int = 0,
        threads: int = 4,
        *,
        preadv: Callable | None = None,
        pwritev: Callable | None = None,
        recorder: Recorder = unrecorded,
    ):
        if claim.fcntl is None:
            raise ZftError(
                "the nvme tier needs Linux, WSL2 or macOS, got Windows; "
                "set param_tier, state_tier and grad_tier to device or cpu"
            )
        self.path = Path(path)
        self.folder = self.path / f"rank-{rank}"
        self._preadv = preadv or os.preadv
        self._pwritev = pwritev or os.pwritev
        self.recorder = recorder
        created = not self.path.exists()
        lock_fd = claim.acquire(self.path, self.folder)
        self._open: dict[str, tuple[int, Path]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=_THREAD_NAME)
        self._count_lock = threading.Lock()
        self.read_bytes = 0
        self.write_bytes = 0
        # also runs at interpreter exit, and holds no reference to self
        self._cleanup = weakref.finalize(
            self, _release, os.getpid(), self._pool, self._open, lock_fd, self.folder, self.path if created else None
        )
        try:
            claim.remove_leftovers(self.folder)
            if rank == 0:
                claim.remove_dead_siblings(self.path, self.folder)
            self.direct = not in_memory(self.folder) and direct_works(self.folder)
        except OSError as error:
            self.close()
            raise ZftError(
                f"nvme_dir {self.path} is not usable ({error.strerror}); set nvme_dir to a folder you can write to"
            ) from error
        if not self.direct and str(self.path) not in _warned_buffered:
            _warned_buffered.add(str(self.path))
            warnings.warn(
                f"nvme_dir {self.path} is on a filesystem in memory or without direct I/O: it uses memory "
                "beyond the plan; set nvme_dir to a disk",
                stacklevel=2,
            )

    def require_free(self, nbytes: int) -> None:
        """Raises ZftError unless `nbytes` more fit on the filesystem."""
        free = shutil.disk_usage(self.path).free
        if nbytes > free:
            raise ZftError(
                f"nvme_dir {self.path} needs {nbytes} bytes ({nbytes / 2**30:.2f} GiB) and has {free} free "
                f"({free / 2**30:.2f} GiB); free space or set nvme_dir to a larger disk"
            )

    def create(self, name: str, nbytes: int) -> NvmeFile:
        """A new file with room for `nbytes`, allocated now so that a full disk shows here (ZftError)."""
        assert name not in self._open, f"nvme file {name!r} exists already"
        file = NvmeFile(self, self.folder / file_name(name), nbytes, name)
        self._open[name] = (file._fd, file.path)
        return file

    def close(self) -> None:
        """Waits for requests in flight, deletes this run's files and gives the folder back. May be called again."""
        self._cleanup()

    def __enter__(self) -> NvmeFolder:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _count(self, read: bool, payload_bytes: int) -> None:
        with self._count_lock:
            if read:
                self.read_bytes += payload_bytes
            else:
                self.write_bytes += payload_bytes


class NvmeFile:
    """`nbytes` on disk. Requests run in no particular order: wait for one before another touches the same bytes."""

    def __init__(self, folder: NvmeFolder, path: Path, nbytes: int, name: str):
        self.path, self.name = path, name
        self.nbytes = nbytes
        self._folder = folder
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if folder.direct else 0)
        self._fd = os.open(path, flags, 0o600)
        try:
            allocate(self._fd, round_up(nbytes))
        except OSError as error:
            os.close(self._fd)
            path.unlink()
            free = shutil.disk_usage(folder.path).free
            raise ZftError(
                f"could not allocate {nbytes} bytes in {path} ({error.strerror}, {free} bytes free); "
                "free space or set nvme_dir to a larger disk"
            ) from error

    def read(self, offset: int, buf: torch.Tensor | np.ndarray, payload_bytes: int | None = None) -> Future:
        """Fills `buf` from `offset` (a multiple of PAGE). The future's result is the payload's bytes."""
        return self._submit(True, offset, buf, payload_bytes)

    def write(self, offset: int, buf: torch.Tensor | np.ndarray, payload_bytes: int | None = None) -> Future:
        """Writes `buf` at `offset`, padding its last page with zeros. `buf` must not change until the future is done.

        `buf`: contiguous, page-aligned in memory (aligned_empty), any length and dtype.
        """
        return self._submit(False, offset, buf, payload_bytes)

    def _submit(self, read: bool, offset: int, buf, payload_bytes: int | None) -> Future:
        view = _bytes_of(buf)
        payload = len(view) if payload_bytes is None else payload_bytes
        assert offset % PAGE == 0, f"offset {offset} in {self.path} is not a multiple of {PAGE}"
        assert offset + len(view) <= round_up(self.nbytes), f"{offset}+{len(view)} is beyond {self.path}"
        request = _Request(lambda: self._folder._count(read, payload), payload)
        starts = range(0, len(view), PIECE_BYTES)
        request.expect(len(starts))
        for start in starts:
            piece = view[start : start + PIECE_BYTES]
            self._folder._pool.submit(request.run, self._transfer, read, offset + start, piece)
        return request.future

    def _transfer(self, read: bool, offset: int, piece: memoryview) -> None:
        """One piece to completion. The bytes after its last full page go through a page of their own: reading past a
        buffer's end would overwrite its neighbour."""
        body = len(piece) // PAGE * PAGE
        buffers = [piece[:body]] if body else []
        tail = len(piece) - body
        if tail:
            page = _bytes_of(aligned_empty(PAGE))
            page[tail:] = bytes(PAGE - tail)
            if not read:
                page[:tail] = piece[body:]
            buffers.append(page)
        with recorded(self._folder.recorder, "nvme read" if read else "nvme write", self.name):
            self._move(read, offset, buffers)
        if tail and read:
            piece[body:] = page[:tail]

    def _move(self, read: bool, offset: int, buffers: list[memoryview]) -> None:
        call = self._folder._preadv if read else self._folder._pwritev
        verb = "read" if read else "write"
        total = sum(map(len, buffers))
        done = 0
        while done < total:
            at = offset + done
            try:
                moved = call(self._fd, _rest(buffers, done), at)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"nvme {verb} of {total - done} bytes at offset {at} failed: "
                    f"{os.strerror(error.errno or errno.EIO)}",
                    str(self.path),
                ) from error
            if moved <= 0:
                raise OSError(
                    errno.EIO, f"nvme {verb} at offset {at} moved {moved} of {total - done} bytes", str(self.path)
                )
            # direct I/O continues at page boundaries only: move the last partial page again
            done = done + moved if done + moved >= total else (done + moved) // PAGE * PAGE
            if moved < PAGE and done < total:
                raise OSError(
                    errno.EIO,
                    f"nvme {verb} at offset {at} stopped after {moved} of {total - done} bytes",
                    str(self.path),
                )


def wait_all(futures: Iterable[Future]) -> int:
    """Waits for all, then raises the first error if any. Returns the payload bytes moved."""
    futures = list(futures)
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return sum(future.result() for future in futures)


class _Request:
    """Joins the pieces of a request into one future, done only when no piece touches the buffer any more."""

    def __init__(self, on_success: Callable[[], None], result: int):
        self.future: Future = Future()
        self._on_success = on_success
        self._result = result
        self._lock = threading.Lock()
        self._left = 0
        self._error: BaseException | None = None

    def expect(self, pieces: int) -> None:
        self._left = pieces
        if pieces == 0:
            self._finish()

    def run(self, transfer: Callable, *args) -> None:
        error = None
        try:
            transfer(*args)
        except BaseException as caught:
            error = caught
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        self._on_success()
        self.future.set_result(self._result)


def _bytes_of(buf: torch.Tensor | np.ndarray) -> memoryview:
    if isinstance(buf, torch.Tensor):
        assert buf.is_contiguous(), "an nvme buffer must be contiguous"
        buf = buf.detach().reshape(-1).view(torch.uint8).numpy()
    assert buf.flags.c_contiguous, "an nvme buffer must be contiguous"
    assert buf.nbytes == 0 or buf.ctypes.data % PAGE == 0, f"an nvme buffer must start at a page of {PAGE} bytes"
    return memoryview(buf.reshape(-1).view(np.uint8))


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(done - len(buffer), 0)
    return rest


def _release(
    pid: int,
    pool: ThreadPoolExecutor,
    files: dict[str, tuple[int, Path]],
    lock_fd: int,
    folder: Path,
    created: Path | None,
) -> None:
    if os.getpid() != pid:
        return  # a forked child must not delete its parent's files
    # the pool's own thread gets here when its request held the last reference, so that none is left to wait for
    pool.shutdown(wait=not threading.current_thread().name.startswith(_THREAD_NAME))
    for fd, path in files.values():
        os.close(fd)
        path.unlink(missing_ok=True)
    files.clear()
    claim.give_back(lock_fd, folder)
    if created is not None:
        claim.rmdir_if_empty(created)
