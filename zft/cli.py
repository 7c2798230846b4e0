"""The command `zft`. A verb is a file of zft/commands with a function `add(app)`; heavy imports wait until a verb runs.

Exit status: 0 done, 1 a failure while running, 2 the user's input is wrong, 130 stopped by Ctrl-C or SIGTERM. A status
other than 0 comes with exactly one line on stderr; ZFT_DEBUG=1 shows the traceback.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable

import typer

from zft import __version__, commands
from zft.config import ZftError
from zft.status import DONE, FAILED, STOPPED, WRONG_INPUT, complain
from zft.train.signals import interrupt_on_sigterm


def entry() -> None:
    """Console script."""
    sys.exit(main(sys.argv[1:]))


def main(args: list[str]) -> int:
    """Run one command line; returns the exit status."""
    return guarded(lambda: application()(args, prog_name="zft", standalone_mode=False))


def guarded(action: Callable[[], int | None]) -> int:
    """The exit status of `action`, with what it raised said in one line."""
    be_quiet()
    interrupt_on_sigterm()
    try:
        return action() or DONE
    except ZftError as error:
        return complain(str(error), WRONG_INPUT)
    except KeyboardInterrupt:
        return complain("stopped", STOPPED)
    except Exception as error:
        return _status(error)


def application() -> typer.Typer:
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback(help="Fine-tune Hugging Face causal LMs that do not fit.")
    def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show it.")):
        return None

    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"zft.commands.{module.name}").add(app)
    return app


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


def _version(wanted: bool) -> None:
    if wanted:
        print(f"zft {__version__}")
        raise typer.Exit
