"""`zft resume RUN key=value …`"""

from __future__ import annotations

from pathlib import Path

import typer

from zft.compose import recompose
from zft.config import RunConfig
from zft.train.folder import RunFolder, check_nvme_dir
from zft.tree import read_tree


def add(app: typer.Typer) -> None:
    app.command("resume", help="Go on with a run from its newest checkpoint, or complete a finished one.")(resume)


def resume(
    folder: Path = typer.Argument(metavar="RUN"),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]..."),
) -> int:
    from zft.execute import compose_for_ranks, execute

    def resumed() -> RunConfig:
        run_folder = RunFolder(folder.absolute())
        tree = read_tree(run_folder.config) | {"out": str(run_folder.path), "overwrite": False}
        run = recompose(tree, list(overrides or []), Path.cwd())
        check_nvme_dir(run)
        return run

    return execute(compose_for_ranks(resumed), resume=True)
