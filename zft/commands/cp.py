"""`zft cp RECIPE FILE`: a copy of a shipped recipe, to change and run by its path."""

from __future__ import annotations

import shutil
from pathlib import Path

import typer

from zft.compose import recipes, recipes_folder
from zft.config import ZftError


def add(app: typer.Typer) -> None:
    app.command("cp", help="Copy a recipe's script, to change it and `zft run` it by its path.")(cp)


def cp(recipe: str, file: Path) -> None:
    if recipe not in recipes():
        raise ZftError(f"no recipe {recipe!r}; choose {', '.join(recipes())}")
    if file.suffix != ".py":
        raise ZftError(f"FILE must end in .py, got {str(file)!r}")
    if file.exists():
        raise ZftError(f"{file} exists; choose another name")
    if not file.parent.is_dir():
        raise ZftError(f"no folder {str(file.parent)!r}; make it first")
    shutil.copyfile(recipes_folder() / f"{recipe}.py", file)
    print(f"zft run {file} model=… data=…" if file.is_absolute() else f"zft run ./{file} model=… data=…")
