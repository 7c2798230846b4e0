"""Exit statuses, and the one line on stderr that comes with every status other than 0."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from zft.config import ZftError

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 130
SAID = "ZFT_SAID"
"""Names the folder where the ranks of one launcher leave their lines, for it to choose one."""


def guarded(action: Callable[[], int | None]) -> int:
    """The exit status of `action`; what it raises is said in one line."""
    be_quiet()
    # SIGTERM is Ctrl-C; the loop takes both over while it runs
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return action() or DONE
    except ZftError as error:
        return complain(str(error), WRONG_INPUT)
    except KeyboardInterrupt:
        return complain("stopped", STOPPED)
    except Exception as error:
        return _status(error)


def rank_count() -> int:
    """Ranks that torchrun, or `nproc`, started together with this process; 1 by itself."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave(status: int) -> NoReturn:
    """End the process. A rank that failed skips libtorch's destructors: its peers are gone, and they may abort for it."""
    if status != DONE and rank_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def complain(line: str, status: int) -> int:
    """Print the line; returns `status`. It comes once for all ranks: from the first, or from the launcher of them all."""
    if os.environ.get("ZFT_DEBUG") and sys.exc_info()[0]:
        traceback.print_exc()
    rank, said = os.environ.get("RANK", "0"), os.environ.get(SAID)
    if said:
        Path(said, f"{SAID}-{rank}").write_text(json.dumps([status, line]), encoding="utf-8")
    elif rank == "0":
        print("zft: " + " ".join(line.split()), file=sys.stderr, flush=True)
    return status


def said_by_ranks(folder: Path, asked: bool) -> tuple[int, str] | None:
    """(status, line) of the rank that knows best what happened; None where none said anything.

    asked: the run was told to stop, so that what ended it is known. Else wrong input explains any other rank's failure,
    and a rank that only lost another (RankError) says less than that one.
    """
    order = [STOPPED, WRONG_INPUT, FAILED] if asked else [WRONG_INPUT, FAILED, STOPPED]
    found = []
    for path in folder.glob(f"{SAID}-*"):
        status, line = json.loads(path.read_text(encoding="utf-8"))
        found.append(
            ((order.index(status), line.startswith("RankError"), int(path.name.rpartition("-")[2])), status, line)
        )
    return min(found)[1:] if found else None


def be_quiet() -> None:
    """One line on stderr means that libraries write none: their logs, bars and warnings show with ZFT_DEBUG=1."""
    if os.environ.get("ZFT_DEBUG"):
        return
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
        ("HF_HUB_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
        ("TQDM_DISABLE", "1"),
    ):
        os.environ.setdefault(name, value)
    warnings.showwarning = _show_warning


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """zft's own warnings are part of its report; those of libraries are for developers."""
    if os.sep + "zft" + os.sep in filename:
        print(f"warning: {message}", flush=True)


def _status(error: Exception) -> int:
    name = type(error).__name__
    if name == "Exit":
        return error.exit_code
    if name == "Abort":
        return complain("stopped", STOPPED)
    if hasattr(error, "format_message"):
        # click's usage errors, wherever typer keeps its copy of click
        return complain(f"{error.format_message().rstrip('.')}; `zft --help` lists the commands", WRONG_INPUT)
    hint = "" if os.environ.get("ZFT_DEBUG") else "; ZFT_DEBUG=1 shows where"
    return complain(f"{name}: {error}{hint}", FAILED)
