"""The parity matrix: the engine against a plain PyTorch loop (tests/plain.py), every triple of settings.

    python scripts/parity.py > scripts/results/parity.txt

A cell is one setting of world, stage, accumulation, wave, activation, placements, precision, optimizer and update. In
each, the first step's loss and gradients (and, for half precision, weights) equal the plain loop's; float32 equals it
to 1e-6 to the end; half precision ends with the same loss; and the bits of the whole record are those of a run with
everything on the device. Then each architecture in float32. Exits with 1 if a cell failed or was not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.parity.cells import ARCHITECTURES, AXES, allowed, check_architecture, check_cell, matrix, name_of  # noqa: E402
from tests.parity.cover import combinations_of, covered  # noqa: E402

CELLS = 160


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strength", type=int, default=3, choices=(2, 3), help="every pair, or every triple of values")
    parser.add_argument("--cells", type=int, default=CELLS, help="at least so many cells")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    print_header()
    cells = matrix(options.strength, options.cells)
    wanted = combinations_of(AXES, options.strength, allowed)
    print(
        f"{len(wanted & covered(cells, options.strength))} of {len(wanted)} "
        f"combinations of {options.strength} values occur"
    )
    print(" ".join(AXES))
    jobs: list[tuple[str, Callable[[], str]]] = [(name_of(cell), lambda cell=cell: check_cell(cell)) for cell in cells]
    jobs += [(f"{name}, {world} ranks", lambda name=name, world=world: check_architecture(name, world))
             for name in ARCHITECTURES for world in (1, 2)]  # fmt: skip
    passed = sum(run(number, name, check) for number, (name, check) in enumerate(jobs, 1))
    print(f"{passed} cells run of {len(jobs)} expected, {time.monotonic() - started:.0f} s")
    return 0 if passed == len(jobs) and wanted <= covered(cells, options.strength) else 1


def run(number: int, name: str, check: Callable[[], str]) -> bool:
    """Print one cell's line; did it pass?"""
    try:
        words, passed = check(), True
    except Exception as error:  # a failed cell is a line; the exit status tells
        words, passed = " ".join(str(error).split())[-1000:] or repr(error), False
    print(f"{number:3d} {'ok  ' if passed else 'FAIL'} {name} | {words}", flush=True)
    return passed


def print_header() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno", "zft"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    print(f"python scripts/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}")
    print(f"commit {commit}{' (with changes in zft)' if changed.strip() else ''}, Python {platform.python_version()}, "
          f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, "
          "one thread a rank")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
