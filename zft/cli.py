"""The command `zft`. A verb is a file of zft/commands with a function `add(app)`; heavy imports wait until a verb runs.

Exit status: 0 done, 1 a failure while running, 2 the user's input is wrong, 130 stopped by Ctrl-C or SIGTERM. A status
other than 0 comes with exactly one line on stderr; ZFT_DEBUG=1 shows the traceback.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer

from zft import __version__, commands
from zft.status import guarded, leave


def entry() -> None:
    """Console script."""
    leave(main(sys.argv[1:]))


def main(args: list[str]) -> int:
    """Run one command line; returns the exit status."""
    return guarded(lambda: application()(args, prog_name="zft", standalone_mode=False))


def application() -> typer.Typer:
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback(help="Fine-tune Hugging Face causal LMs that do not fit.")
    def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show it.")):
        return None

    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"zft.commands.{module.name}").add(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"zft {__version__}")
        raise typer.Exit
