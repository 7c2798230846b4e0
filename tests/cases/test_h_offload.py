"""Cases h: weights and optimizer state in host memory and on disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.adapters import method
from tests.harness import run_ranks
from tests.tiny import tiny_folder
from tests.toy import WIDTH, Toy, same_bits, square_loss, toy_batches, toy_config, weights_of
from zft.api import Engine
from zft.config import SGD, EngineConfig, ZftError
from zft.engine.pool import PinnedMemory
from zft.tiers import nvme
from zft.tiers.cpu import Arena
from zft.tiers.page import PAGE

TIERS = {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"}
Usage = namedtuple("Usage", "total used free")


def on_disk(folder: Path, **settings) -> EngineConfig:
    return toy_config(nvme_dir=str(folder), **TIERS, **settings)


def steps(engine: Engine, count: int = 2) -> dict[str, torch.Tensor]:
    for rows in toy_batches(2, count):
        engine.step(rows, loss_fn=square_loss)
    return weights_of(engine)


# 62


def test_62_the_disk_is_checked_before_a_byte_is_written(tmp_path, monkeypatch):
    """A folder that is a file, is not writable or lacks room is refused before a byte is written, with numbers.

    Not reported: a folder below a file, and a disk that is short by one byte.
    """
    (tmp_path / "file").write_text("mine")
    for bad, said in (("file", "Not a directory"), ("file/below", "Not a directory"), ("/proc/zft", "No such file")):
        with pytest.raises(ZftError, match=f"nvme_dir .*{said}.*set nvme_dir to a folder you can write to"):
            Engine(Toy(), on_disk(tmp_path / bad))
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"

    with Engine(Toy(), on_disk(tmp_path / "t")) as engine:
        needed = sum(record.nvme_bytes(engine.config) for record in engine.parts.records.values())
        files = list((tmp_path / "t").rglob("*.zft"))
        assert needed == sum(path.stat().st_size for path in files) > 0
    for free in (0, needed - 1):
        monkeypatch.setattr(nvme.shutil, "disk_usage", lambda _path, free=free: Usage(needed, needed - free, free))
        with pytest.raises(ZftError, match=rf"needs {needed} bytes .* and has {free} free"):
            Engine(Toy(), on_disk(tmp_path / "t"))
        assert not (tmp_path / "t").exists()
    monkeypatch.setattr(nvme.shutil, "disk_usage", lambda _path: Usage(needed, 0, needed))
    Engine(Toy(), on_disk(tmp_path / "t")).close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_62_a_failed_write_raises_at_the_write(code, tmp_path):
    """A write that fails raises at once, naming file, offset and reason; half an update is never gone on with."""

    def fail(_fd, _buffers, _offset):
        raise OSError(code, os.strerror(code))

    said = f"nvme write of .* at offset .* failed: {os.strerror(code)}"
    with Engine(Toy(), on_disk(tmp_path / "t")) as engine:
        before, rows = steps(engine, 1), toy_batches(2)[0]
        engine.parts.folder._pwritev = fail
        with pytest.raises(OSError, match=said) as caught:  # a gradient's
            engine.step(rows, loss_fn=square_loss)
        assert caught.value.errno == code and caught.value.filename.startswith(str(tmp_path))
        engine.parts.folder._pwritev = os.pwritev
        assert same_bits(weights_of(engine), before)
        engine.step(rows, loss_fn=square_loss)
        engine.parts.folder._pwritev = fail
        with pytest.raises(OSError, match=said):  # the update's
            weights_of(engine)
        engine.parts.folder._pwritev = os.pwritev
        with pytest.raises(RuntimeError, match="resume from the last checkpoint"):
            engine.step(rows, loss_fn=square_loss)


@pytest.mark.parametrize("length", [0, PAGE, PAGE + 100])
def test_62_a_file_that_has_become_short_is_an_error(length, tmp_path):
    """A file cut to nothing, to a page or to part of one is an error when it is read, never zeros."""
    with Engine(Toy(), on_disk(tmp_path / "t")) as engine:
        steps(engine, 1)
        for path in (tmp_path / "t").rglob("*.zft"):
            os.truncate(path, length)
        with pytest.raises(OSError, match="nvme read at offset .* (moved 0|stopped after 100)"):
            weights_of(engine)


# 63


def test_63_two_engines_in_one_folder(tmp_path):
    """A second engine in a folder in use is refused; in a folder of its own it changes nothing of the first.

    Not reported: the same folder under another name, and an engine that ends while the other still trains.
    """
    expected = steps(Engine(Toy(seed=1), toy_config()))
    (tmp_path / "alias").symlink_to(tmp_path / "t")
    with Engine(Toy(seed=1), on_disk(tmp_path / "t")) as first:
        for same in ("t", "alias", "x/../t"):
            with pytest.raises(ZftError, match=f"in use by another run .process {os.getpid()}.*set another nvme_dir"):
                Engine(Toy(), on_disk(tmp_path / same))
        source = "import sys; from zft.tiers.nvme import NvmeFolder; NvmeFolder(sys.argv[1])"
        command = [sys.executable, "-c", source, tmp_path / "t"]
        other = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert other.returncode != 0 and "in use by another run" in other.stderr
        with Engine(Toy(seed=2), on_disk(tmp_path / "t2")) as second:
            first.step(toy_batches(2, 2)[0], loss_fn=square_loss)
            steps(second)
        first.step(toy_batches(2, 2)[1], loss_fn=square_loss)
        assert same_bits(weights_of(first), expected)
    assert not (tmp_path / "t").exists() and not (tmp_path / "t2").exists(), "files are removed on exit"


def test_63_files_of_a_killed_run_are_never_read(tmp_path):
    """What a killed run left under the same names is removed, not read; files that are not zft's stay."""
    source = textwrap.dedent("""
        import os, signal, sys
        from tests.cases.test_h_offload import on_disk, steps
        from tests.toy import Toy
        from zft.api import Engine
        engine = Engine(Toy(seed=9), on_disk(sys.argv[1]))
        steps(engine)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", source, tmp_path / "t"], env=environment, cwd=root, timeout=120)
    left = list((tmp_path / "t").rglob("*.zft"))
    assert left, "the killed run left its files"
    (tmp_path / "t" / "rank-0" / "notes.txt").write_text("mine")
    expected = steps(Engine(Toy(seed=1), toy_config()))
    with Engine(Toy(seed=1), on_disk(tmp_path / "t")) as engine:
        assert same_bits(steps(engine), expected)
    assert [path.name for path in (tmp_path / "t").rglob("*") if path.is_file()] == ["notes.txt"]


# 65


class Crowded(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(400))

    def forward(self, x):
        return self.inner(x) * torch.stack(list(self.scales)).mean(0)


class Many(Toy):
    """400 parameters in one group, under a name that alone is too long for a file, and not ASCII."""

    _no_split_modules = ("Crowded",)

    def __init__(self):
        super().__init__(layers=0)
        holder = self
        for part in ("x" * 200, "模型" * 60):
            holder.add_module(part, nn.Module())
            holder = getattr(holder, part)
        holder.add_module("crowd", Crowded())
        self.path = holder

    def body(self, x):
        return self.path.crowd(x)


def test_65_names_of_files(tmp_path):
    """400 parameters of one group lie in one file whose name has at most 255 bytes.

    Not reported: a module name that is too long by itself, and one that is not ASCII.
    """
    torch.manual_seed(0)
    expected = steps(Engine(Many(), toy_config()))
    torch.manual_seed(0)
    with Engine(Many(), on_disk(tmp_path / "t")) as engine:
        names = [path.name for path in (tmp_path / "t").rglob("*.zft")]
        groups = [group for group in engine.parts.records if len(group.layout.spans) > 400]
        assert len(groups) == 1 and len(names) == len(engine.parts.records) == len(set(names))
        assert max(len(os.fsencode(name)) for name in names) <= 255
        assert same_bits(steps(engine), expected)


# 66


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024


def load_and_measure(base: str, warm: str, nvme_dir: str | None, adapter: bool) -> tuple[int, int, int]:
    """(how much loading raised this rank's peak, bytes of its records in memory, bytes of its largest unit)."""
    tiers = {**TIERS, "nvme_dir": nvme_dir} if nvme_dir else {}
    config = EngineConfig(precision="bf16", compute_device="cpu", optim=SGD(lr=0.1), **tiers)
    options = {"method": method()} if adapter else {}
    with Engine.from_pretrained(warm, config, **options):
        pass  # what is imported and compiled at first use is not the model's
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak so far becomes what is resident now
    before = peak_bytes()
    with Engine.from_pretrained(base, config, **options) as engine:
        raised = peak_bytes() - before
        rows = [(record, row) for record in engine.parts.records.values() for row in record.fields()]
        kept = sum(n * dtype.itemsize for record, (name, dtype, n) in rows if record.slabs[name].resident)
        largest = max(sum(g.layout.padded_numel * 2 for g in unit.groups) for unit in engine.parts.units)
    return raised, kept, largest


MARGIN_BYTES = 24 << 20
"""The allocator's, and the configuration's and tokenizer's objects."""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """168 MB of bfloat16 in 40 layers of 4 MB."""
    shape = {"hidden_size": 512, "intermediate_size": 896, "num_hidden_layers": 40, "vocab_size": 2048}
    return tiny_folder("llama", tmp_path_factory.mktemp("large") / "base", **shape)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_66_a_rank_never_holds_the_model(size, large, tmp_path):
    """Loading raises a rank's peak by its own share and two of the largest units, not by the model."""
    model_bytes = (large / "model.safetensors").stat().st_size
    folders = (str(large), str(tiny_folder("llama", tmp_path / "warm")))
    for raised, kept, largest in run_ranks(size, load_and_measure, *folders, None, True):
        assert kept < 1.1 * model_bytes / size
        assert raised <= kept + 2 * largest + MARGIN_BYTES, f"{raised} for {kept} + 2 x {largest}, model {model_bytes}"


def test_66_one_huge_embedding_and_everything_on_disk(tmp_path):
    """With all state on disk, loading raises the peak by two of the largest units, here a tied embedding of 61 MB."""
    shape = {"hidden_size": 256, "vocab_size": 120_000, "tie_word_embeddings": True}
    base = tiny_folder("llama", tmp_path / "base", **shape)
    folders = (str(base), str(tiny_folder("llama", tmp_path / "warm")), str(tmp_path / "t"))
    for raised, kept, largest in run_ranks(2, load_and_measure, *folders, False):
        assert kept == 0 and largest > 60e6
        assert raised <= 2 * largest + MARGIN_BYTES, f"{raised} for 2 x {largest}"


# 67


def test_67_pinned_memory_costs_what_it_says():
    """Pinned buffers have their exact size, up to a page, so the budget is true; without a GPU nothing is pinned.

    Not reported: one byte, and one byte above a power of two. tests/gpu/test_tiers.py has what needs a GPU.
    """
    for nbytes in (1, 3 << 20, (1 << 24) + 1, (1 << 26) - 1, 10_000_001):
        with Arena(nbytes) as arena:
            assert arena.nbytes == -(-nbytes // PAGE) * PAGE < nbytes + PAGE
            assert arena.take(nbytes).untyped_storage().nbytes() <= arena.nbytes + PAGE
            assert arena.pinned == torch.cuda.is_available()
    for pin in (True, False):
        memory = PinnedMemory(torch.device("cpu"), pin)
        assert memory(10_000_001).numel() == 10_000_001 and not memory.pin and not memory.arenas


@pytest.mark.parametrize("pin", [True, False])
def test_67_the_flag_changes_nothing_without_a_gpu(pin):
    """`pin_memory` true or false, and an arena that is told not to pin: the same bits, nothing pinned."""
    with Engine(Toy(), toy_config(param_tier="cpu", state_tier="cpu", grad_tier="cpu", pin_memory=pin)) as engine:
        tensors = [slab.tensor for record in engine.parts.records.values() for slab in record.slabs.values()]
        assert tensors and not any(tensor.is_pinned() for tensor in tensors)
        assert same_bits(steps(engine), steps(Engine(Toy(), toy_config())))
    with Arena(5000, pin=False) as arena:
        assert not arena.pinned
