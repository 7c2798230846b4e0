"""`zft eval FOLDER|RUN data=…`: loss and perplexity on a file, or lm-eval's tasks."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from zft.compose import base_config, compose, find_recipe, recompose
from zft.config import RunConfig, ZftError
from zft.train import checkpoints
from zft.train.folder import RunFolder
from zft.tree import read_tree

ADAPTER = "adapter_config.json"


def add(app: typer.Typer) -> None:
    app.command("eval", help="Loss and perplexity of a model or run on a file, or --tasks of lm-eval.")(evaluate)


def evaluate(
    what: str = typer.Argument(metavar="FOLDER|RUN", help="Exported or Hub model, adapter folder, or run folder."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]..."),
    tasks: str = typer.Option(
        None, "--tasks", metavar="A,B", help="Tasks of lm-eval, or their .yaml, not data=; needs lm_eval."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    overrides = list(overrides or [])
    has_data = any(text.startswith("data=") for text in overrides)
    if tasks is not None:
        if overrides:
            raise ZftError(f"--tasks brings its own data and settings, got {overrides[0]!r} too; leave one out")
        _show({"model": what, "tasks": run_tasks(_exported(what), tasks.split(","))}, as_json)
        return
    if not has_data:
        raise ZftError(f"on which data? zft eval {what} data=FILE, or --tasks A,B with lm_eval installed")
    run, checkpoint = _chosen(what, overrides)
    if run.nproc > 1 and "WORLD_SIZE" not in os.environ:
        start = f"torchrun --nproc-per-node={run.nproc} -m zft eval …"
        raise ZftError(f"zft eval starts no ranks, got nproc={run.nproc}; use {start}")

    from zft.dist import World
    from zft.train.evaluate import evaluate_model

    world = World.from_env(run.engine.compute_device, run.engine.shard_ranks, run.engine.timeout_s)
    with _own_nvme_dir(run, overrides) as run:
        found = evaluate_model(run, world, base_config(find_recipe(run.recipe, Path.cwd())), checkpoint)
    if world.is_main:
        step = None if checkpoint is None else int(checkpoint.name.split("-")[1].split(".")[0])
        named = {"model": what, "step": step, "data": [source.path for source in run.data]}
        _show(named | vars(found) | {"perplexity": found.perplexity}, as_json)


def _chosen(what: str, overrides: list[str]) -> tuple[RunConfig, Path | None]:
    """What to evaluate: a run's newest checkpoint with the run's own settings, else its export; or a model by itself."""
    folder = RunFolder(Path(what).expanduser().absolute())
    if folder.is_run:
        found = checkpoints.newest(folder.checkpoints)
        if found is not None:
            tree = read_tree(folder.config) | {"out": str(folder.path), "overwrite": False, "nproc": 1}
            return replace(recompose(tree, overrides, Path.cwd(), free=("data",)), eval_data=()), found
        what = _exported(what)
    given = Path(what).expanduser()
    if (given / ADAPTER).is_file():
        saved = json.loads((given / ADAPTER).read_text(encoding="utf-8"))
        kind = "dora" if saved.get("use_dora") else "rslora" if saved.get("use_rslora") else "lora"
        base = saved.get("base_model_name_or_path")
        overrides = [f"model={base}", f"method={kind}", f"method.adapter={given}", *overrides]
    else:
        overrides = [f"model={what}", *overrides]
    return replace(compose("sft", overrides, Path.cwd()), eval_data=()), None


def _exported(what: str) -> str:
    folder = RunFolder(Path(what).expanduser())
    if not folder.is_run:
        return what
    if not folder.is_exported:
        raise ZftError(f"{what} has no export yet; `zft resume {what}` completes the run")
    return str(folder.export)


@contextmanager
def _own_nvme_dir(run: RunConfig, overrides: list[str]) -> Iterator[RunConfig]:
    """A folder of its own for weights on NVMe: the run may be going on, and a model by itself has no run folder."""
    if any(text.startswith("engine.nvme_dir=") for text in overrides):
        yield run
        return
    out = Path(run.out)
    folder = out / "tiers-eval" if out.is_dir() else Path.cwd() / ".zft-eval"
    yield replace(run, engine=replace(run.engine, nvme_dir=str(folder)))
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def run_tasks(folder: str, tasks: list[str]) -> dict[str, dict[str, float]]:
    """{task: {metric: value}} by lm-eval on plain transformers. Raises ZftError without lm_eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ZftError("--tasks needs the package lm_eval: `pip install lm_eval`, or give data=FILE instead")
    import lm_eval
    import torch
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    asked = tasks_call(folder, tasks, manager.all_tasks, "cuda" if torch.cuda.is_available() else "cpu")
    # lm-eval ends its worker processes by SIGTERM, and they would inherit the command's handler
    earlier = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        found = lm_eval.simple_evaluate(task_manager=manager, **asked)["results"]
    finally:
        signal.signal(signal.SIGTERM, earlier)
    return {task: _figures(row) for task, row in found.items()}


def _figures(row: dict[str, object]) -> dict[str, float]:
    """The numbers of a task's row in lm-eval's results, by metric."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "sample_len"}
    return {name.removesuffix(",none"): value for name, value in numbers.items()}


def tasks_call(folder: str, tasks: list[str], known: list[str], device: str) -> dict[str, object]:
    """The arguments of lm_eval.simple_evaluate. known: names of lm-eval's tasks. Raises ZftError for a task that isn't.

    A task is a name or the path of a task's .yaml; the device has to be said, lm-eval takes cuda for granted.
    """
    chosen = []
    for task in tasks:
        path = Path(task).expanduser()
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise ZftError(f"--tasks: no file {task!r}; give a task's .yaml or one of lm-eval's names")
            chosen.append(str(path.absolute()))
        elif task in known:
            chosen.append(task)
        else:
            near = difflib.get_close_matches(task, known, 1)
            hint = f"did you mean {near[0]}?" if near else "`lm_eval ls tasks` lists them"
            raise ZftError(f"--tasks: lm-eval has no task {task!r}; {hint}")
    options = {"pretrained": folder}
    if (Path(folder) / ADAPTER).is_file():
        base = json.loads((Path(folder) / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
        options = {"pretrained": base, "peft": folder}
    return {"model": "hf", "model_args": options, "tasks": chosen, "device": device}


def _show(figures: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, ensure_ascii=False))
        return
    for task, row in figures.get("tasks", {}).items():
        print(f"{task}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if "loss" in figures:
        step = "" if figures["step"] is None else f" after step {figures['step']}"
        lost = f", {figures['cut']:,} cut, {figures['dropped_rows']:,} dropped"
        print(f"{figures['model']}{step}: loss {figures['loss']:.4f}, perplexity {figures['perplexity']:.4g}")
        print(f"on {figures['tokens']:,} tokens of {figures['rows']:,} rows{lost}")
