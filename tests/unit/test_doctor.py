"""`zft doctor`: what it measures here, what it keeps, and the advice it draws from what was found."""

import json
import os
import subprocess
import sys
from copy import deepcopy

import pytest

from zft.plan.health import advice

GIB = 2**30
FAST = {"direct": True, "read": 3e9, "write": 2e9}
SLOW = {"direct": True, "read": 2e9, "write": 0.4e9}
HEALTHY = {
    "compute_dtype": "float32",
    "versions": {"torch": "2.13.0"},
    "wanted": {"torch": ">=2.9"},
    "satisfied": {"torch": True},
    "cores": 8,
    "load": 0.5,
    "torch_cuda": "13.0",
    "gpus": [{"name": "one", "total_bytes": 24 * GIB, "free_bytes": 23 * GIB}],
    "memory": {"total_bytes": 64 * GIB, "available_bytes": 60 * GIB, "lockable_bytes": None},
    "nvme_dir": "/disk",
    "disk": {"direct": FAST, "buffered": FAST, "free_bytes": 900 * GIB},
    "rates": {"h2d": 25e9},
    "kept": "/cache/doctor.json",
}


def changed(**paths) -> dict:
    """HEALTHY with some entries replaced; `a__b` is entry b of entry a."""
    found = deepcopy(HEALTHY)
    for path, value in paths.items():
        *folders, last = path.split("__")
        there = found
        for name in folders:
            there = there[name]
        there[last] = value
    return found


def test_nothing_to_say_of_a_healthy_machine():
    assert advice(HEALTHY) == []


@pytest.mark.parametrize(
    ("found", "is_problem", "words"),
    [
        (changed(wanted__peft=">=0.17"), True, "peft is missing; pip install 'peft>=0.17'"),
        (changed(satisfied__torch=False), True, "torch 2.13.0 is not >=2.9; pip install -U 'torch>=2.9'"),
        (changed(rates__h2d=6e9), True, "host to device runs at 6.0 GB/s"),
        (changed(disk__direct={**FAST, "direct": False}), True, "/disk has no direct I/O"),
        (changed(disk__direct=SLOW, disk__buffered=SLOW), True, "moves 0.40 GB/s"),
        (changed(disk__buffered={**FAST, "read": 9e9, "write": 9e9}), False, "engine.nvme_threads=8"),
        (changed(disk__free_bytes=5 * GIB), True, "/disk has 5.0 GiB free"),
        (changed(disk={"error": "it is read-only"}), True, "the nvme tier can't use /disk: it is read-only"),
        (changed(memory__available_bytes=16 * GIB), True, "75% of the memory is taken"),
        (changed(load=9.5), True, "the load is 9.5 on 8 cores"),
        (changed(memory__lockable_bytes=2**16), False, "ulimit -l is low"),
        (changed(kept=None), True, "set XDG_CACHE_HOME"),
    ],
)
def test_each_fault_is_named_with_its_remedy(found, is_problem, words):
    (row,) = advice(found)
    assert row.is_problem == is_problem and words in row.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_machine_without_a_gpu_hears_what_it_computes_in(dtype):
    (note,) = advice(changed(gpus=[], torch_cuda=None, compute_dtype=dtype))
    assert not note.is_problem and f"in {dtype}" in note.text
    problem, _ = advice(changed(gpus=[], compute_dtype=dtype))
    assert problem.is_problem and "sees no GPU" in problem.text


def doctor(folder, cache) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "zft", "doctor", "--quick", "--json", "--nvme-dir", str(folder)]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_it_measures_this_machine_and_keeps_the_rates(tmp_path):
    done = doctor(tmp_path, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rates = found["rates"]
    assert min(rates["dram"], rates["update"]) > 1e8
    for dtype in ("float32", "bfloat16"):
        assert rates[f"matmul_{dtype}"] and all(flops > 1e8 for _width, flops in rates[f"matmul_{dtype}"])
    assert all(found["disk"][kind][way] > 1e6 for kind in ("direct", "buffered") for way in ("read", "write"))
    (kept,) = json.loads((tmp_path / "cache" / "zft" / "doctor.json").read_text()).values()
    assert kept["matmul_float32"] == rates["matmul_float32"] and kept["nvme"] == rates["nvme"]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]  # the measured files are gone


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_place_of_the_folder_is_a_problem(tmp_path, below):
    (tmp_path / "file").write_text("no folder")
    done = doctor(tmp_path / "file" / below, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rates"]["nvme"] == {}
    assert any(row["is_problem"] and f"{tmp_path / 'file'} is a file" in row["text"] for row in found["advice"])
