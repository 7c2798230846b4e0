"""The NVMe tier against plain file contents, and against the faults that a disk can have."""

import errno
import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from zft.config import ZftError
from zft.tiers import claim, nvme
from zft.tiers.cpu import aligned_empty
from zft.tiers.nvme import NvmeFolder, wait_all
from zft.tiers.page import PAGE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the nvme tier refuses Windows")


@pytest.fixture(autouse=True)
def _no_direct_io_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*direct I/O.*")
        yield


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return aligned_empty(nbytes).copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4095, 4096, 4097, 65537, 3 * nvme.PIECE_BYTES + 5])
def test_round_trip_of_any_length(tmp_path, nbytes):
    with NvmeFolder(tmp_path / "t") as folder:
        file = folder.create("x", PAGE + nbytes)
        data = noise(nbytes)
        assert file.write(PAGE, data).result() == nbytes
        back = aligned_empty(nbytes).zero_()
        assert file.read(PAGE, back).result() == nbytes
        assert torch.equal(data, back)
        assert (folder.read_bytes, folder.write_bytes) == (nbytes, nbytes)


def test_read_leaves_the_bytes_behind_the_buffer_alone(tmp_path):
    with NvmeFolder(tmp_path / "t") as folder:
        file = folder.create("x", 2 * PAGE)
        file.write(0, noise(2 * PAGE)).result()
        storage = aligned_empty(2 * PAGE).fill_(7)
        file.read(0, storage[: PAGE + 10]).result()
        assert (storage[PAGE + 10 :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_tensors_and_arrays_of_any_dtype(tmp_path, dtype):
    with NvmeFolder(tmp_path / "t") as folder:
        file = folder.create("x", 40000)
        data = noise(5000 * dtype.itemsize).view(dtype)
        file.write(0, data, payload_bytes=17).result()
        back = aligned_empty(5000 * dtype.itemsize).numpy()
        file.read(0, back, payload_bytes=18).result()
        assert (back == data.view(torch.uint8).numpy()).all()
        assert (folder.write_bytes, folder.read_bytes) == (17, 18)


def test_many_requests_in_flight(tmp_path):
    with NvmeFolder(tmp_path / "t", threads=4) as folder:
        files = [folder.create(f"layer/{i}", 100_000) for i in range(8)]
        data = [noise(100_000, seed=i) for i in range(8)]
        assert wait_all(f.write(0, d) for f, d in zip(files, data, strict=True)) == 800_000
        back = [aligned_empty(100_000) for _ in files]
        wait_all([f.read(0, b) for f, b in zip(files, back, strict=True)])
        assert all(torch.equal(a, b) for a, b in zip(data, back, strict=True))


def test_misuse_is_caught_before_any_byte_moves(tmp_path):
    with NvmeFolder(tmp_path / "t") as folder:
        file = folder.create("x", 2 * PAGE)
        for offset, buffer in [
            (1, aligned_empty(8)),
            (0, aligned_empty(3 * PAGE)),
            (0, aligned_empty(PAGE)[1:]),
            (0, aligned_empty(PAGE).view(64, 64).t()),
            (0, np.zeros((8, 8))[:, 1]),
        ]:
            with pytest.raises(AssertionError):
                file.write(offset, buffer)
        with pytest.raises(AssertionError, match="exists already"):
            folder.create("x", 1)


def test_short_transfers_are_continued(tmp_path):
    """Every call moves at most 5000 bytes, as an interrupted or busy disk may."""
    calls = []

    def cut(buffers):
        left, parts = 5000, []
        for buffer in buffers:
            parts.append(buffer[:left])
            left -= len(parts[-1])
        return [p for p in parts if len(p)]

    def preadv(fd, buffers, offset):
        calls.append(offset)
        return _unaligned(os.preadv, fd, cut(buffers), offset)

    def pwritev(fd, buffers, offset):
        calls.append(offset)
        return _unaligned(os.pwritev, fd, cut(buffers), offset)

    with NvmeFolder(tmp_path / "t", preadv=preadv, pwritev=pwritev) as folder:
        file = folder.create("x", 30_000)
        data, back = noise(30_000), aligned_empty(30_000)
        file.write(0, data).result()
        file.read(0, back).result()
        assert torch.equal(data, back)
    assert len(calls) >= 2 * 7 and all(offset % PAGE == 0 for offset in calls)


def _unaligned(call, fd, buffers, offset):
    """Direct I/O wants whole pages; go through a second, buffered descriptor of the same file."""
    plain = os.open(f"/proc/self/fd/{fd}" if sys.platform == "linux" else fd, os.O_RDWR)
    try:
        return call(plain, buffers, offset)
    finally:
        os.close(plain)


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_transfer_names_file_offset_and_errno(tmp_path, verb, code):
    def fail(fd, buffers, offset):
        if offset == nvme.PIECE_BYTES:
            raise OSError(code, os.strerror(code))
        return sum(map(len, buffers))

    with NvmeFolder(tmp_path / "t", preadv=fail, pwritev=fail) as folder:
        file = folder.create("model.layers.0", 2 * nvme.PIECE_BYTES)
        future = getattr(file, verb)(0, aligned_empty(2 * nvme.PIECE_BYTES))
        with pytest.raises(OSError, match=f"nvme {verb} .*offset {nvme.PIECE_BYTES}.*model.layers.0") as caught:
            future.result()
        assert caught.value.errno == code and caught.value.filename == str(file.path)
        assert (folder.read_bytes, folder.write_bytes) == (0, 0)
        with pytest.raises(OSError):
            wait_all([file.write(0, aligned_empty(PAGE)), getattr(file, verb)(nvme.PIECE_BYTES, aligned_empty(PAGE))])


def test_a_truncated_file_is_an_error_not_zeros(tmp_path):
    with NvmeFolder(tmp_path / "t") as folder:
        file = folder.create("x", 4 * PAGE)
        os.truncate(file.path, 2 * PAGE)
        with pytest.raises(OSError, match="moved 0 of"):
            file.read(0, aligned_empty(4 * PAGE)).result()
        os.truncate(file.path, 2 * PAGE + 100)
        with pytest.raises(OSError, match="stopped after 100"):
            file.read(2 * PAGE, aligned_empty(2 * PAGE)).result()


def test_close_deletes_only_what_is_ours_and_can_be_repeated(tmp_path):
    folder = NvmeFolder(tmp_path / "new" / "deep")
    folder.create("x", 10)
    folder.close()
    folder.close()
    assert not (tmp_path / "new" / "deep").exists()
    kept = tmp_path / "kept"
    (kept / "rank-0").mkdir(parents=True)
    (kept / "rank-0" / "notes.txt").write_text("mine")
    with NvmeFolder(kept) as folder:
        folder.create("x", 10)
    assert [p.name for p in (kept / "rank-0").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_dropped_folder_cleans_up(tmp_path, in_flight):
    folder = NvmeFolder(tmp_path / "t")
    file = folder.create("x", 64 << 20)
    future = file.write(0, aligned_empty(64 << 20)) if in_flight else None
    del folder, file
    if in_flight:
        assert future.result() == 64 << 20
    deadline = time.monotonic() + 10
    while (tmp_path / "t").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (tmp_path / "t").exists()


def test_in_use_by_another_folder_of_this_process_or_of_another(tmp_path):
    with NvmeFolder(tmp_path / "t"), NvmeFolder(tmp_path / "t", rank=1):
        with pytest.raises(ZftError, match=f"in use by another run .process {os.getpid()}"):
            NvmeFolder(tmp_path / "t")
        code = "import sys; from zft.tiers.nvme import NvmeFolder; NvmeFolder(sys.argv[1], 1)"
        run = subprocess.run([sys.executable, "-c", code, tmp_path / "t"], capture_output=True, text=True)
        assert run.returncode != 0 and "in use by another run" in run.stderr
    NvmeFolder(tmp_path / "t").close()


def test_files_of_a_killed_run_are_removed_whatever_its_world_size(tmp_path):
    code = textwrap.dedent("""
        import os, signal, sys
        from zft.tiers.nvme import NvmeFolder
        folders = [NvmeFolder(sys.argv[1], rank) for rank in (0, 1, 7)]
        for folder in folders:
            folder.create("secret", 5000)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, tmp_path / "t"])
    assert len(list(tmp_path.glob("t/rank-*/*.zft"))) == 3
    with NvmeFolder(tmp_path / "t"), NvmeFolder(tmp_path / "t", rank=1) as second:
        assert list(tmp_path.glob("t/rank-*/*.zft")) == []
        assert not (tmp_path / "t" / "rank-7").exists()
        second.create("secret", 5000)


def test_files_go_when_the_process_ends_without_close(tmp_path):
    code = "import sys; from zft.tiers.nvme import NvmeFolder; f = NvmeFolder(sys.argv[1]); f.create('x', 9); 1 / 0"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code, tmp_path / "t"], capture_output=True, text=True)
    assert "ZeroDivisionError" in run.stderr and not (tmp_path / "t").exists()


def test_a_forked_child_does_not_delete_its_parents_files(tmp_path):
    code = textwrap.dedent("""
        import os, sys
        from zft.tiers.nvme import NvmeFolder
        f = NvmeFolder(sys.argv[1]); x = f.create('x', 9)
        if os.fork() == 0:
            f.close()
            sys.exit(0)
        os.wait()
        print(x.path.exists())
    """)
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code, tmp_path / "t"], capture_output=True, text=True)
    assert run.stdout == "True\n" and not (tmp_path / "t").exists()


def test_preflight_says_what_is_wrong(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ZftError, match="cannot be used .*file.*; set nvme_dir"):
        NvmeFolder(tmp_path / "file" / "t")
    with NvmeFolder(tmp_path / "t") as folder:
        folder.require_free(1)
        with pytest.raises(ZftError, match=r"needs \d+ bytes .* free .*; free space"):
            folder.require_free(1 << 60)


def test_a_folder_without_write_permission(tmp_path):
    """Root may write into any folder with a mode; nobody may into /proc and /sys."""
    tmp_path.chmod(0o500)
    for folder in [Path("/proc"), Path("/sys"), *([] if os.geteuid() == 0 else [tmp_path])]:
        with pytest.raises(ZftError, match="cannot be used .*; set nvme_dir"):
            NvmeFolder(folder / "t")


def test_full_disk_at_create(tmp_path, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with NvmeFolder(tmp_path / "t") as folder:
        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(ZftError, match="could not allocate 5000 bytes in .*No space left"):
            folder.create("x", 5000)
        assert list(folder.folder.glob("*.zft")) == []


def test_disk_space_is_taken_at_create(tmp_path):
    with NvmeFolder(tmp_path / "t") as folder:
        file = folder.create("x", 1 << 20)
        assert os.stat(file.path).st_blocks * 512 >= 1 << 20


def test_file_names_are_safe_short_and_distinct(tmp_path):
    names = ["a/b", "a_b", "../up", "x" * 1000, "x" * 999 + "y", "模型", "模形", "", ".", "a\0b"]
    with NvmeFolder(tmp_path / "t") as folder:
        paths = [folder.create(name, 1).path for name in names]
        assert len({p.name for p in paths}) == len(names)
        assert all(p.parent == folder.folder and len(os.fsencode(p.name)) <= 255 for p in paths)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")
def test_tmpfs_warns_once_and_works():
    path = Path(f"/dev/shm/zft-test-{os.getpid()}")
    with pytest.warns(UserWarning, match="in memory or without direct I/O"), NvmeFolder(path) as folder:
        assert not folder.direct
        file, data, back = folder.create("x", 70_001), noise(70_001), aligned_empty(70_001)
        file.write(0, data).result()
        file.read(0, back).result()
        assert torch.equal(data, back)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NvmeFolder(path).close()
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no O_DIRECT to refuse")
@pytest.mark.parametrize("refusal", ["open", "pwritev"])
def test_direct_io_refused_at_open_or_at_the_transfer(tmp_path, monkeypatch, refusal):
    real = getattr(os, refusal)

    def refuse(target, what, *args, **kwargs):
        if refusal == "pwritev" or what & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(target, what, *args, **kwargs)

    monkeypatch.setattr(os, refusal, refuse)
    with pytest.warns(UserWarning, match="without direct I/O"), NvmeFolder(tmp_path / "t", pwritev=real) as folder:
        assert not folder.direct
        assert not list(folder.folder.glob("*.zft"))


def test_windows_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "fcntl", None)
    with pytest.raises(ZftError, match="got Windows; set param_tier"):
        NvmeFolder(tmp_path)
