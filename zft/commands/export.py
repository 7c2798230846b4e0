"""`zft export WHAT FOLDER`: a folder that transformers loads, from a run, one of its checkpoints, or another engine's."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import typer

from zft.config import RunConfig, ZftError
from zft.overrides import name_on_disk
from zft.train import checkpoints
from zft.train.folder import RunFolder
from zft.tree import build, read_tree

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add(app: typer.Typer) -> None:
    app.command("export", help="Write a folder that transformers loads, from a run, a checkpoint or another engine's.")(
        export
    )


def export(
    source: Path = typer.Argument(
        metavar="RUN|CHECKPOINT", help="Run folder, one checkpoint, DeepSpeed or DCP folder."
    ),
    folder: Path = typer.Argument(help="Where to write; must be new or empty."),
    base: str = typer.Option(None, help="The model that was trained, if the run does not tell."),
    dtype: str = typer.Option(None, help="bf16, fp16 or fp32; the base's unless given."),
    max_shard_size: str = typer.Option("5GB", help="Largest file, as 5GB or 500MB."),
    merge: bool = typer.Option(False, "--merge", help="Fold an adapter into its base: a full model."),
    trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Run code that comes with the model."),
) -> None:
    if not source.is_dir():
        raise ZftError(f"no folder {str(source)!r}; give a run folder or a checkpoint")
    if dtype not in (None, *DTYPES):
        raise ZftError(f"--dtype must be {', '.join(DTYPES)}, got {dtype!r}")
    if folder.exists() and (not folder.is_dir() or os.listdir(folder)):
        raise ZftError(f"{folder} exists and is not empty; choose another folder")
    checkpoint, run = _find(source.absolute())

    import torch

    options = {"dtype": getattr(torch, DTYPES[dtype]) if dtype else None, "max_shard_size": max_shard_size}
    if checkpoint is not None:
        run = replace(run, model=name_on_disk(base, "--base", Path.cwd())) if base else run
        _export_checkpoint(checkpoint, run, folder, merge, options)
    else:
        _export_foreign(source, folder, base, options, trust_remote_code)
    print(f"done: {folder}")


def _find(source: Path) -> tuple[Path | None, RunConfig | None]:
    """The checkpoint that is meant, and its run; (None, None) for a folder that is not zft's."""
    if RunFolder(source).is_run:
        found = checkpoints.newest(RunFolder(source).checkpoints)
        if found is None:
            raise ZftError(f"{source} has no complete checkpoint; `zft resume {source}` goes on")
        source = found
    if not (source / checkpoints.MANIFEST).is_file():
        return None, None
    run_folder = source.parents[1]
    return source, build(read_tree(RunFolder(run_folder).config) | {"out": str(run_folder)}, Path.cwd())


def _export_checkpoint(checkpoint: Path, run: RunConfig, folder: Path, merge: bool, options: dict) -> None:
    import torch

    from zft.checkpoint.adapter import export_adapter, is_adapter
    from zft.checkpoint.hf import base_dtype, export_folder
    from zft.checkpoint.merge import merged_units, plain_model
    from zft.checkpoint.names import base_model
    from zft.checkpoint.source import StoredWeights
    from zft.data.template import resolve_template
    from zft.dist import World
    from zft.models.hub import resolve_model
    from zft.train.setup import facts, run_tokenizer, structure
    from zft.train.state import TrainState

    base = resolve_model(run.model)
    tokenizer = run_tokenizer(run, base)
    model, source = structure(run, base, tokenizer, World.single("cpu"))
    if merge and not is_adapter(model):
        raise ZftError("--merge is for adapters, and this run trained every weight; leave it out")
    stored = StoredWeights(checkpoint)
    if run.data_options.chat_template:
        options["chat_template"], _ = resolve_template(tokenizer, run.data_options.chat_template)
    state = TrainState.from_dict(stored.manifest.train)
    options |= {"tokenizer": tokenizer, "facts": facts(run, state), "stop_ids": state.stop_ids}
    if is_adapter(model) and not merge:
        export_adapter(folder, stored.units(options["dtype"] or torch.float32), model, base, **options)
        return
    options["dtype"] = options["dtype"] or base_dtype(base_model(model), base)
    if merge:
        plain = plain_model(base_model(model), base, run.trust_remote_code)
        names = [name for name, _ in model.named_parameters()]
        units = merged_units(model, source, stored.units_of(names), plain, options["dtype"])
        export_folder(folder, units, plain, base, **options)
    else:
        export_folder(folder, stored.units(options["dtype"]), model, base, **options)


def _export_foreign(source: Path, folder: Path, base: str | None, options: dict, trust_remote_code: bool) -> None:
    from zft.checkpoint.foreign import consolidate, foreign_kind
    from zft.models.hub import resolve_model

    kind = foreign_kind(source)
    if kind is None:
        raise ZftError(f"{source} is neither a zft run or checkpoint nor one of DeepSpeed or torch DCP")
    if base is None:
        raise ZftError(f"{source} is a {kind} checkpoint; add --base MODEL, the model that was trained")
    consolidate(source, folder, resolve_model(base), trust_remote_code, facts={"base_model": base}, **options)
