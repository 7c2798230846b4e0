"""One rank of `nproc=N`: `python -m zft.worker CONFIG [resume]`, started by zft/launch.py."""

from __future__ import annotations

import sys
from pathlib import Path

from zft.execute import execute
from zft.status import DONE, STOPPED, guarded, leave
from zft.tree import build, read_tree


def work(config: str, *resume: str) -> int:
    status = execute(build(read_tree(Path(config)), Path.cwd()), bool(resume))
    # a rank that fails makes the launcher end the others, and those are still saving; it knows itself that it was stopped
    return DONE if status == STOPPED else status


if __name__ == "__main__":
    leave(guarded(lambda: work(*sys.argv[1:])))
