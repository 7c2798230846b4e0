"""Claiming a folder for one rank of one run: a lock that dies with its process, and no leftovers of a dead one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from zft.config import ZftError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SUFFIX = ".zft"
"""Of the files that a run owns; others in the folder stay."""
_PATIENCE_S = 2.0


def acquire(path: Path, folder: Path) -> int:
    """Creates `folder` and locks it for this process. Returns the lock's descriptor."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        gone = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = _try_lock(folder)
        except FileNotFoundError as error:
            fd, gone = None, error  # another rank's cleanup removed the folder in between; or it can't be made
        except OSError as error:
            raise _unusable(path, error) from error
        if fd is not None:
            return fd
        # rank 0 holds a sibling's lock for a moment while it looks for dead runs
        if time.monotonic() > deadline:
            if gone is not None:
                raise _unusable(path, gone) from gone
            holder = _holder(folder)
            raise ZftError(
                f"nvme_dir {path} is in use by another run (process {holder}); "
                "wait for it to end or set another nvme_dir"
            )
        time.sleep(0.05)


def _unusable(path: Path, error: OSError) -> ZftError:
    return ZftError(
        f"nvme_dir {path} cannot be used ({error.strerror}: {error.filename}); set nvme_dir to a folder you can write to"
    )


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


def remove_leftovers(folder: Path) -> None:
    """Deletes a dead run's files; they are never read. Files that are not zft's stay."""
    for file in folder.glob(f"*{SUFFIX}"):
        file.unlink(missing_ok=True)


def remove_dead_siblings(path: Path, own: Path) -> None:
    """A dead run may have had more ranks than this one."""
    for folder in path.glob("rank-*"):
        if folder == own or not (folder / "lock").exists():
            continue
        try:
            fd = _try_lock(folder)
        except OSError:
            continue  # gone, or not ours to clean
        if fd is not None:
            give_back(fd, folder)


def give_back(lock_fd: int, folder: Path) -> None:
    """Order matters: the lock file goes while the lock is held, so nobody can lock a file that is about to vanish."""
    remove_leftovers(folder)
    (folder / "lock").unlink(missing_ok=True)
    os.close(lock_fd)
    rmdir_if_empty(folder)


def rmdir_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # somebody else's files are in it, or another rank was faster
