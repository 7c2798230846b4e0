"""The NVMe tier: preallocated files in a run-owned folder, read and written page-aligned by a small thread pool."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from zft.config import ZftError
from zft.tiers.cpu import PAGE, aligned_empty, round_up

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PIECE_BYTES = 8 << 20
"""A request is split into pieces of at most this size, so that one large request keeps several in flight."""
_SUFFIX = ".zft"
_LOCK_PATIENCE_S = 2.0
_warned_buffered: set[str] = set()


class NvmeFolder:
    """This rank's files under `path`, owned until close(): locked against other runs, deleted at the end.

    `preadv` and `pwritev` take (fd, buffers, offset) like their namesakes in `os`; tests pass failing ones.
    Raises ZftError if the folder cannot be created, written or is in use, and on Windows.
    """

    def __init__(self, path: str | Path, rank: int = 0, threads: int = 4, *,
                 preadv: Callable | None = None, pwritev: Callable | None = None):
        if fcntl is None:
            raise ZftError("the nvme tier needs Linux, WSL2 or macOS, got Windows; "
                           "set param_tier, state_tier and grad_tier to device or cpu")
        self.path = Path(path)
        self.folder = self.path / f"rank-{rank}"
        self._preadv = preadv or os.preadv
        self._pwritev = pwritev or os.pwritev
        created = not self.path.exists()
        lock_fd = _acquire(self.path, self.folder)
        self._files: dict[str, NvmeFile] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="zft-nvme")
        self._count_lock = threading.Lock()
        self.read_bytes = 0
        self.write_bytes = 0
        # also runs at interpreter exit, and holds no reference to self
        self._cleanup = weakref.finalize(self, _release, os.getpid(), self._pool, self._files, lock_fd, self.folder,
                                         self.path if created else None)
        try:
            _remove_leftovers(self.folder)
            if rank == 0:
                _remove_dead_siblings(self.path, self.folder)
            self.direct = _direct_works(self.folder)
        except OSError as error:
            self.close()
            raise ZftError(f"nvme_dir {self.path} is not usable ({error.strerror}); "
                           "set nvme_dir to a folder you can write to") from error
        if not self.direct and str(self.path) not in _warned_buffered:
            _warned_buffered.add(str(self.path))
            warnings.warn(f"{self.path} is on a filesystem without direct I/O: reads and writes go through the page "
                          "cache and use memory beyond the plan", stacklevel=2)

    def require_free(self, nbytes: int) -> None:
        """Raises ZftError unless `nbytes` more fit on the filesystem."""
        free = shutil.disk_usage(self.path).free
        if nbytes > free:
            raise ZftError(f"nvme_dir {self.path} needs {nbytes} bytes ({nbytes / 2**30:.1f} GiB) and has {free} free "
                           f"({free / 2**30:.1f} GiB); free space or set nvme_dir to a larger disk")

    def create(self, name: str, nbytes: int) -> NvmeFile:
        """A new file with room for `nbytes`, allocated now so that a full disk shows here (ZftError)."""
        assert name not in self._files, f"nvme file {name!r} exists already"
        file = NvmeFile(self, self.folder / _file_name(name), nbytes)
        self._files[name] = file
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

    def __init__(self, folder: NvmeFolder, path: Path, nbytes: int):
        self.path = path
        self.nbytes = nbytes
        self._folder = folder
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if folder.direct else 0)
        self._fd = os.open(path, flags, 0o600)
        try:
            _allocate(self._fd, round_up(nbytes))
        except OSError as error:
            self._close()
            free = shutil.disk_usage(folder.path).free
            raise ZftError(f"could not allocate {nbytes} bytes in {path} ({error.strerror}, {free} bytes free); "
                           "free space or set nvme_dir to a larger disk") from error

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
                raise OSError(error.errno, f"nvme {verb} of {total - done} bytes at offset {at} failed: "
                              f"{os.strerror(error.errno or errno.EIO)}", str(self.path)) from error
            if moved <= 0:
                raise OSError(errno.EIO, f"nvme {verb} at offset {at} moved {moved} of {total - done} bytes",
                              str(self.path))
            # direct I/O continues at page boundaries only: move the last partial page again
            done = done + moved if done + moved >= total else (done + moved) // PAGE * PAGE
            if moved < PAGE and done < total:
                raise OSError(errno.EIO, f"nvme {verb} at offset {at} stopped after {moved} of {total - done} bytes",
                              str(self.path))

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)


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


def _file_name(name: str) -> str:
    """A short, safe and distinct file name for any unit name."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{safe}-{digest}{_SUFFIX}"


def _allocate(fd: int, nbytes: int) -> None:
    if nbytes == 0:
        return
    if not hasattr(os, "posix_fallocate"):  # macOS
        os.ftruncate(fd, nbytes)
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def _direct_works(folder: Path) -> bool:
    """Really writes and reads a page with O_DIRECT: some filesystems open the file and refuse the transfer."""
    if not hasattr(os, "O_DIRECT"):
        return False
    probe = folder / f"probe{_SUFFIX}"
    page = _bytes_of(aligned_empty(PAGE))
    page[:] = bytes(PAGE)
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            probe.unlink(missing_ok=True)
            return False
        raise
    try:
        return os.pwritev(fd, [page], 0) == PAGE and os.preadv(fd, [page], 0) == PAGE
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


def _acquire(path: Path, folder: Path) -> int:
    """Creates `folder` and locks it for this process. Returns the lock's descriptor."""
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = _try_lock(folder)
        except FileNotFoundError:
            fd = None  # another rank's cleanup removed the folder in between
        except OSError as error:
            raise ZftError(f"nvme_dir {path} cannot be used ({error.strerror}: {error.filename}); "
                           "set nvme_dir to a folder you can write to") from error
        if fd is not None:
            return fd
        # rank 0 holds a sibling's lock for a moment while it looks for dead runs
        if time.monotonic() > deadline:
            holder = _holder(folder)
            raise ZftError(f"nvme_dir {path} is in use by another run (process {holder}); "
                           "wait for it to end or set another nvme_dir")
        time.sleep(0.05)


def _try_lock(folder: Path) -> int | None:
    lock = folder / "lock"
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the previous owner may have unlinked the file between open and flock
        if os.fstat(fd).st_ino != os.stat(lock).st_ino:
            raise BlockingIOError
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd


def _holder(folder: Path) -> str:
    try:
        return (folder / "lock").read_text() or "unknown"
    except OSError:
        return "unknown"


def _remove_leftovers(folder: Path) -> None:
    """Deletes a dead run's files; they are never read. Files that are not zft's stay."""
    for file in folder.glob(f"*{_SUFFIX}"):
        file.unlink(missing_ok=True)


def _remove_dead_siblings(path: Path, own: Path) -> None:
    """A dead run may have had more ranks than this one."""
    for folder in path.glob("rank-*"):
        if folder == own or not (folder / "lock").exists():
            continue
        try:
            fd = _try_lock(folder)
        except OSError:
            continue  # gone, or not ours to clean
        if fd is not None:
            _give_back(fd, folder)


def _give_back(lock_fd: int, folder: Path) -> None:
    """Order matters: the lock file goes while the lock is held, so nobody can lock a file that is about to vanish."""
    _remove_leftovers(folder)
    (folder / "lock").unlink(missing_ok=True)
    os.close(lock_fd)
    _rmdir_if_empty(folder)


def _rmdir_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # somebody else's files are in it, or another rank was faster


def _release(pid: int, pool: ThreadPoolExecutor, files: dict[str, NvmeFile], lock_fd: int, folder: Path,
             created: Path | None) -> None:
    if os.getpid() != pid:
        return  # a forked child must not delete its parent's files
    pool.shutdown(wait=True)
    for file in files.values():
        file._close()
    files.clear()
    _give_back(lock_fd, folder)
    if created is not None:
        _rmdir_if_empty(created)
