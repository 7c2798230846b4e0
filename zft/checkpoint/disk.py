"""Every change that a save makes on the disk goes through here, so that a test can stop it at each one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from zft.tiers.direct import write_all
from zft.tiers.disk import allocate


class Disk:
    """The few operations of a save. Each public method is a point at which a process may die or a disk fill up."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new file; its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def reserve(self, fd: int, nbytes: int) -> None:
        """A full disk is found now and not after an hour; where the filesystem cannot reserve, `write` finds it."""
        allocate(fd, nbytes)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """All of `data` at `offset`."""
        write_all(fd, data, offset)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        if os.name == "nt":  # a folder can't be opened there
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()


DISK = Disk()
STALE = re.compile(r"\.tmp-step-\d{8}")
"""What a save or a removal that died has left."""


def work_folder(folder: Path) -> Path:
    """Where `folder` is built, and where it goes to be removed: a name that nobody takes for a checkpoint."""
    return folder.with_name(f".tmp-{folder.name}")


def set_aside(folder: Path) -> Path:
    """Where the checkpoint that was at `folder` waits until its successor is there."""
    return folder.with_name(f"{folder.name}.old")


def remove_tree(path: Path) -> None:
    """Delete a folder of a few files, file by file."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            DISK.unlink(child)
    DISK.remove_folder(path)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint: it stops counting at once, by a rename."""
    work = work_folder(folder)
    if work.exists():
        remove_tree(work)
    DISK.rename(folder, work)
    remove_tree(work)


def remove_stale(checkpoints: Path) -> None:
    """Delete what saves that died have left among a run's checkpoints."""
    for path in sorted(checkpoints.iterdir()):
        if STALE.fullmatch(path.name):
            remove_tree(path)


def put_in_place(work: Path, folder: Path) -> None:
    """The finished folder gets its name. At any moment `folder` or the one set aside is complete."""
    aside = set_aside(folder)
    if folder.exists():
        if aside.exists():
            remove_tree(aside)
        DISK.rename(folder, aside)
    DISK.rename(work, folder)
    DISK.sync_folder(folder.parent)
    if aside.exists():
        remove_tree(aside)
