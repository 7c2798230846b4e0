"""`zft preview RECIPE model=… data=…`: what the model would learn from, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from zft.compose import base_config, compose, find_recipe
from zft.config import ZftError


def add(app: typer.Typer) -> None:
    app.command("preview", help="Show what would be learned: rows, tokens, masks, what is cut or dropped.")(preview)


def preview(
    recipe: str = typer.Argument(help="A name that `zft ls` shows, or the path of a script."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]..."),
    as_json: bool = typer.Option(False, "--json", help="Print the numbers as one JSON object."),
    html: Path = typer.Option(None, "--html", metavar="FILE", help="Write the report as a page, too."),
) -> None:
    if html is not None and not html.parent.is_dir():
        raise ZftError(f"--html: no folder {str(html.parent)!r}; make it first")
    run = compose(recipe, list(overrides or []), Path.cwd())

    from rich.console import Console

    from zft.data import prepare
    from zft.models.hub import cache_dir, resolve_model
    from zft.models.load import embedding_rows, load_config
    from zft.train.setup import run_tokenizer

    base = resolve_model(run.model)
    tokenizer = run_tokenizer(run, base)
    prepared = prepare(
        [vars(source) for source in run.data],
        tokenizer,
        run.data_options,
        seq_len=run.train.seq_len,
        seed=run.train.seed,
        method=base_config(find_recipe(recipe, Path.cwd())),
        eval_data=[vars(source) for source in run.eval_data] or None,
        cache_dir=cache_dir() / "data",
        vocab_size=embedding_rows(load_config(base, run.trust_remote_code), tokenizer),
    )
    if html is not None:
        html.write_text(prepared.report.html(), encoding="utf-8")
    if as_json:
        print(json.dumps(prepared.report.to_dict(), ensure_ascii=False))
    else:
        Console().print(prepared.report.render(samples=3))
