"""`zft run RECIPE key=value …`"""

from __future__ import annotations

from pathlib import Path

import typer

from zft.compose import compose, find_recipe, options, recipes
from zft.config import RunConfig, ZftError
from zft.observe.metrics import check_tracker
from zft.schema import GROUPS, keys
from zft.train.folder import RunFolder


def add(app: typer.Typer) -> None:
    settings = {"help_option_names": []}
    app.command("run", help="Fine-tune a model. `zft run sft --help` lists the keys.", context_settings=settings)(run)


def run(
    recipe: str = typer.Argument(None, help="A name that `zft ls` shows, or the path of a script."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]..."),
    show_help: bool = typer.Option(False, "--help", "-h", help="List the keys."),
) -> int:
    from zft.execute import compose_for_ranks, execute

    if show_help:
        print(help_text(recipe))
        return 0
    if recipe is None:
        raise ZftError(f"which recipe? zft run RECIPE model=… data=…, with RECIPE one of {', '.join(recipes())}")

    def composed() -> RunConfig:
        made = compose(recipe, list(overrides or []), Path.cwd())
        RunFolder(made.out).check(made)
        check_tracker(made.track)
        return made

    return execute(compose_for_ranks(composed))


def help_text(recipe: str | None) -> str:
    """Every key with its default, what it may be and its doc."""
    if recipe:
        find_recipe(recipe, Path.cwd())
    lines = [f"Usage: zft run {recipe or 'RECIPE'} model=… data=… [key=value …]", ""]
    lines += [f"  {group}={' | '.join(options(group))}" for group in GROUPS]
    section = None
    for key in keys().values():
        head = key.name.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", f"{head}.*" if head else "keys"]
        default = "required" if key.name in ("model", "data") else f"default {_shown(key.default)}"
        lines.append(f"  {key.name:28} {key.describe()} ({default})")
        lines += [f"  {'':28} {key.doc}"] if key.doc else []
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
