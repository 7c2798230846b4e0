"""`zft plan RECIPE model=… [key=value …]`: will it fit, where does everything go, how long is a step?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import typer

from zft.compose import compose
from zft.config import RunConfig

NO_DATA = "zft/no-data"
"""Stands for the data that a plan does not need: it counts full sequences."""


def add(app: typer.Typer) -> None:
    app.command("plan", help="Show what fits where, and how long a step takes. Needs a model's config only.")(plan)


def plan(
    recipe: str = typer.Argument(help="A name that `zft ls` shows, or the path of a script."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]..."),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as one JSON object."),
    compare: bool = typer.Option(False, "--compare", help="Show stages 0 to 3 and every placement side by side."),
) -> None:
    run = composed(recipe, list(overrides or []))

    from rich.console import Console

    from zft.plan.runs import compare_run, plan_run
    from zft.plan.show import placements_table, render

    if compare:
        plans = compare_run(run)
        if as_json:
            print(json.dumps([each.to_dict() for each in plans]))
        else:
            _console(Console).print(placements_table(plans))
        return
    choice = plan_run(run)
    if as_json:
        others = [each.to_dict() for each in choice.others]
        print(json.dumps({**choice.plan.to_dict(), "why": choice.why, "others": others}))
    else:
        _console(Console).print(render(choice))


def composed(recipe: str, overrides: list[str]) -> RunConfig:
    """The run; `data=` may be missing and `model=` may be a name of zft/plan/models.yaml."""
    from zft.plan.models import hub_id

    named = [
        f"model={hub_id(text.removeprefix('model='))}" if text.startswith("model=") else text for text in overrides
    ]
    if not any(text.startswith("data=") for text in named):
        named.append(f"data={NO_DATA}")
    return replace(compose(recipe, named, Path.cwd()), overwrite=False)


def _console(console: type):
    """Wide enough for the tables where the output is no terminal."""
    made = console()
    return made if made.is_terminal else console(width=160)
