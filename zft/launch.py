"""`nproc=N`: N ranks on this machine from the resolved configuration, by torchrun's own launcher.

The ranks run in sessions of their own, so that Ctrl-C reaches only this process; it asks each rank once to save and
stop, and a second time to end at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from zft.config import RunConfig
from zft.status import DONE, FAILED, SAID, STOPPED, complain, said_by_ranks
from zft.tree import to_yaml


def launch(run: RunConfig, resume: bool) -> int:
    """Start the ranks and wait; says the line of the rank that knows best, and returns its exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # a rank that fails says why in its one line
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="zft-") as folder:
        resolved = Path(folder) / "config.yaml"
        resolved.write_text(to_yaml(run), encoding="utf-8")
        settings = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=run.nproc, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
            run_id=Path(folder).name, max_restarts=0, start_method="spawn", signals_to_handle="SIGHUP,SIGQUIT",
        )  # fmt: skip
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // run.nproc)))
        os.environ[SAID] = folder
        asked, status = _pass_on_signals(), DONE
        try:
            elastic_launch(settings, sys.executable)("-m", "zft.worker", str(resolved), *(["resume"] if resume else []))
        except ChildFailedError as error:
            status = _status(error)
        finally:
            del os.environ[SAID]
        if (said := said_by_ranks(Path(folder), bool(asked))) is not None:
            return complain(said[1], said[0])
        return STOPPED if asked else status


def _status(error) -> int:
    codes = [failure.exitcode for failure in error.failures.values()]
    return max((code for code in codes if code > 0), default=FAILED)


def _pass_on_signals() -> list[int]:
    """Send SIGINT and SIGTERM on to the ranks; returns the list that receives them."""
    import psutil

    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        for child in psutil.Process().children():
            child.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    return received


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
