"""`zft report RUN`: what a run did, as one page."""

from __future__ import annotations

from pathlib import Path

import typer

from zft.config import ZftError
from zft.observe.report import write_report
from zft.train.folder import RunFolder


def add(app: typer.Typer) -> None:
    app.command("report", help="Write report.html of a run: curves, memory, traffic, timeline, data.")(report)


def report(folder: Path = typer.Argument(metavar="RUN", help="Run folder.")) -> None:
    if not RunFolder(folder).is_run:
        raise ZftError(f"{folder} is not a run folder: it has no config.yaml")
    print(f"done: {write_report(folder)}")
