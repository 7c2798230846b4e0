"""What a filesystem can do: direct I/O, room allocated in advance, safe file names."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path

from zft.tiers.claim import SUFFIX
from zft.tiers.page import PAGE, page_buffer


def file_name(name: str) -> str:
    """A short, safe and distinct file name for any unit name."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{safe}-{digest}{SUFFIX}"


def allocate(fd: int, nbytes: int) -> None:
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


def in_memory(folder: Path) -> bool:
    """Newer kernels accept O_DIRECT on tmpfs."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return False
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # fields: id, parent, major:minor, root, mount point, options, ..., "-", filesystem, source, options
    return any(line.split()[2] == number and line.split(" - ")[1].split()[0] in ("tmpfs", "ramfs") for line in mounts)


def direct_works(folder: Path) -> bool:
    """Really writes and reads a page with O_DIRECT: some filesystems open the file and refuse the transfer."""
    if not hasattr(os, "O_DIRECT"):
        return False
    probe = folder / f"probe{SUFFIX}"
    page = page_buffer(PAGE)
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
