"""`zft push FOLDER REPO`: upload an export, or a finished run's, to the Hub."""

from __future__ import annotations

from pathlib import Path

import typer

from zft.config import ZftError
from zft.status import DONE, FAILED, complain
from zft.train.folder import RunFolder


def add(app: typer.Typer) -> None:
    app.command("push", help="Upload an exported model to the Hub; repeating it continues.")(push)


def push(
    folder: Path = typer.Argument(metavar="FOLDER", help="Exported folder or run folder."),
    repo: str = typer.Argument(metavar="REPO", help="USER/NAME; made if it is not there."),
    private: bool = typer.Option(False, "--private", help="Make the repository private, if it is made."),
    trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Run code that comes with the model."),
) -> int:
    run = RunFolder(folder)
    if run.is_run and not run.is_exported:
        raise ZftError(f"{folder} has no export yet; `zft resume {folder}` completes the run")

    from zft.checkpoint.push import PushError
    from zft.checkpoint.push import push as upload

    try:
        url = upload(run.export if run.is_run else folder, repo, private, trust_remote_code)
    except PushError as error:
        return complain(str(error), FAILED)
    print(f"done: {url}")
    return DONE
