"""Files past the page cache: any runs of bytes at any offsets, beside a bytearray; a filesystem that refuses; a full disk."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zft.tiers import direct
from zft.tiers.direct import Reader, WriteBehind, set_direct, write_all
from zft.tiers.page import PAGE

SIZE = 20 * PAGE + 77
SMALL = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def buffer(monkeypatch):
    monkeypatch.setattr(direct, "BUFFER_BYTES", 4 * PAGE)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def refuses(fd: int, data: memoryview, offset: int) -> None:
    """A filesystem that takes the flag and not the transfer."""
    if is_direct(fd):
        raise OSError(errno.EINVAL, "Invalid argument")
    write_all(fd, data, offset)


@SMALL
@given(
    runs=st.lists(st.tuples(st.integers(0, 1), st.integers(0, SIZE), st.integers(0, 9 * PAGE)), max_size=12),
    store=st.sampled_from([write_all, refuses]),
    seed=st.integers(0, 9),
)
def test_runs_land_where_they_belong(tmp_path, buffer, runs, store, seed):
    """Runs of two files, some following on from the one before, some overlapping: the last written stays."""
    expected = [bytearray(SIZE), bytearray(SIZE)]
    fds = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT | os.O_TRUNC) for n in (0, 1)]
    try:
        for fd in fds:
            os.ftruncate(fd, SIZE)
        behind, at = WriteBehind(store), 0
        for number, (which, start, length) in enumerate(runs):
            at = at if number % 3 == 1 else start  # every third goes on where the last ended
            data = bytearray(os.urandom(min(length, SIZE - at)))
            expected[which][at : at + len(data)] = data
            behind.write(fds[which], memoryview(data), at)
            at += len(data)
            data[:] = bytes(len(data))  # it was copied
        behind.flush()
        behind.close()
        for fd, whole in zip(fds, expected, strict=True):
            assert os.pread(fd, SIZE + 1, 0) == whole
            assert set_direct(fd, True)
            reader = Reader()
            assert b"".join(bytes(block) for block in reader.blocks(fd)) == whole
            for start, length in ((0, SIZE), (seed * 991, 5 * PAGE + 3), (PAGE, PAGE), (SIZE - 5, 5)):
                out = bytearray(length)
                assert reader.read(fd, start, memoryview(out)) == length
                assert out == whole[start : start + length]
            assert reader.read(fd, SIZE - 3, memoryview(bytearray(9))) == 3, "the file ends there"
            assert reader.read(fd, SIZE, memoryview(bytearray(9))) == 0
            assert is_direct(fd), "the end of a file is no refusal"
    finally:
        for fd in fds:
            os.close(fd)


def test_whole_pages_go_past_the_cache(tmp_path, buffer):
    """All but the first part of a page and the last; each request as large as the buffer allows."""
    seen = []

    def store(fd: int, data: memoryview, offset: int) -> None:
        seen.append((offset, len(data), is_direct(fd)))
        write_all(fd, data, offset)

    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    behind = WriteBehind(store)
    behind.write(fd, memoryview(bytes(100)), 0)
    behind.write(fd, memoryview(bytes(10 * PAGE)), 100)
    behind.flush()
    behind.close()
    os.close(fd)
    assert seen == [
        (0, 4 * PAGE, True),
        (4 * PAGE, 4 * PAGE, True),
        (8 * PAGE, 2 * PAGE, True),
        (10 * PAGE, 100, False),
    ]


@pytest.mark.parametrize("kind", ["write", "flush"])
def test_an_error_of_the_thread_is_raised(tmp_path, buffer, kind):
    def full(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    behind = WriteBehind(full)
    with pytest.raises(OSError, match="No space left"):
        for number in range(3 if kind == "write" else 1):
            behind.write(fd, memoryview(bytes(4 * PAGE)), number * 4 * PAGE)
        behind.flush()
    behind.close()
    os.close(fd)


def test_a_filesystem_that_refuses_direct_reads(tmp_path, buffer, monkeypatch):
    """The flag is taken back and the page cache serves; an error that stays is raised."""
    (tmp_path / "x").write_bytes(whole := os.urandom(9 * PAGE + 5))
    fd, preadv, refused = os.open(tmp_path / "x", os.O_RDONLY), os.preadv, []

    def picky(fd: int, buffers: list, offset: int) -> int:
        if is_direct(fd):
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", picky)
    assert set_direct(fd, True)
    assert b"".join(map(bytes, Reader().blocks(fd))) == whole and refused and not is_direct(fd)
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EINVAL, "Invalid argument")))
    with pytest.raises(OSError, match="Invalid argument"):
        Reader().read(fd, 3, memoryview(bytearray(5)))
    os.close(fd)
