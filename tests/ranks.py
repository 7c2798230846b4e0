"""Runs a piece of Python on several gloo ranks, as torchrun would, and shows the traceback of the first that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(source: str, size: int, *arguments: object, timeout_s: float = 180.0) -> list[str]:
    """Each rank runs `source` with sys.argv[1:] = arguments; what they printed. A rank that fails or hangs fails it."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(size):
        own = {key: str(value) for key, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **own}
        command = [sys.executable, "-c", source, *map(str, arguments)]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    end = time.monotonic() + timeout_s
    printed = []
    try:
        for rank, process in enumerate(ranks):
            out, error = process.communicate(timeout=max(0.1, end - time.monotonic()))
            assert process.returncode == 0, f"rank {rank} of {size}: {error[-3000:]}"
            printed.append(out)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return printed
