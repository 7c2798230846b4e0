"""Exit statuses, and the one line on stderr that comes with every status other than 0."""

from __future__ import annotations

import os
import sys
import traceback

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 130


def complain(line: str, status: int) -> int:
    """Print the line; returns `status`. Ranks other than the first are silent: the line comes once for all."""
    if os.environ.get("ZFT_DEBUG"):
        traceback.print_exc()
    if os.environ.get("RANK", "0") == "0":
        print("zft: " + " ".join(line.split()), file=sys.stderr, flush=True)
    return status
