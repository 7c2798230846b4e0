"""`zft ls`: the recipes, and the options of every group."""

from __future__ import annotations

import ast

import typer

from zft.compose import options, recipes, recipes_folder
from zft.schema import GROUPS


def add(app: typer.Typer) -> None:
    app.command("ls", help="List the recipes and the options of method=, engine=, optimizer=, hardware=, experiment=.")(
        ls
    )


def ls() -> None:
    print("recipes")
    for name in recipes():
        doc = ast.get_docstring(ast.parse((recipes_folder() / f"{name}.py").read_text(encoding="utf-8"))) or ""
        print(f"  {name:12}{doc.splitlines()[0] if doc else ''}")
    for group in GROUPS:
        print(f"{group}=")
        print(f"  {', '.join(options(group))}")
