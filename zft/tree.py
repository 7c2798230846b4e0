"""A run as nested plain data (config.yaml), to frozen dataclasses and back.

A tree has one entry for each key of `zft.schema`, and `name` for the option that was taken of a group.
"""

from __future__ import annotations

import re
import time
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path

from zft import config
from zft.config import (
    DataOptions,
    DataSource,
    EngineConfig,
    Hardware,
    Method,
    MethodConfig,
    RunConfig,
    TrainConfig,
    ZftError,
)
from zft.schema import AUTO_TIERS, OptimizerSection, keys

ADAPTER_LR = 2e-4
OPTIMIZERS = {
    "adamw": (config.AdamW, {}),
    "adamw_compact": (config.AdamW, {"compact": True}),
    "sgd": (config.SGD, {}),
    "lion": (config.Lion, {}),
}
_ENGINE_TOP = ("precision", "activation", "compile")
_ENGINE_TRAIN = ("max_grad_norm", "seed")


def defaults() -> dict:
    """The tree of every key's default: what configs/*.yaml build on."""
    tree: dict = {"recipe": None}
    for key in keys().values():
        put(tree, key.name, _plain(key.default))
    return tree


def _plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def put(tree: dict, key: str, value: object) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[leaf] = value


def get(tree: dict, key: str) -> object:
    for part in key.split("."):
        tree = tree[part]
    return tree


def build(tree: dict, cwd: Path) -> RunConfig:
    """A checked tree to frozen dataclasses; the defaults that depend on other keys are filled in."""
    problems = [f"{key} is missing; add {key}=…" for key in ("model", "data") if not tree[key]]
    raise_all(problems)
    method = MethodConfig(**_tuples(tree["method"]) | {"name": Method(tree["method"]["name"])})
    train = _dataclass(TrainConfig, tree["train"])
    section = OptimizerSection(**_tuples(tree["optimizer"]))
    lr = train.lr if train.lr is not None or method.name == Method.full else ADAPTER_LR
    out = tree["out"] or _default_out(tree, cwd)
    optim = _optimizer(section, lr, train.weight_decay, problems)
    auto = tuple(tier for tier in AUTO_TIERS if tree["engine"][tier] is None)
    engine = {name: value for name, value in tree["engine"].items() if name not in auto}
    engine |= {name: tree[name] for name in _ENGINE_TOP} | {name: tree["train"][name] for name in _ENGINE_TRAIN}
    engine["nvme_dir"] = engine["nvme_dir"] or _default_nvme_dir(out)
    if tree["eval_data"] in ([], None) and train.eval_every:
        problems.append(f"train.eval_every={train.eval_every} needs eval_data=…")
    raise_all(problems)
    return RunConfig(
        recipe=tree["recipe"],
        model=tree["model"],
        data=tuple(DataSource(**source) for source in tree["data"]),
        eval_data=tuple(DataSource(**source) for source in tree["eval_data"] or ()),
        out=out,
        engine=replace(_dataclass(EngineConfig, engine), optim=optim),
        auto_tiers=auto,
        method=method,
        train=replace(train, lr=optim.lr),
        data_options=_dataclass(DataOptions, tree["data_options"]),
        hardware=_dataclass(Hardware, tree["hardware"]),
        **{name: tree[name] for name in ("overwrite", "nproc", "trust_remote_code", "track", "samples")},
    )


def to_tree(run: RunConfig) -> dict:
    """The inverse of `build`: plain data for config.yaml."""
    optim = run.engine.optim
    name = next(
        name for name, (cls, fixed) in OPTIMIZERS.items()
        if type(optim) is cls and all(getattr(optim, key) == value for key, value in fixed.items())
        and ("compact" in fixed) == getattr(optim, "compact", False)
    )  # fmt: skip
    owners = {"engine": run.engine, "optimizer": optim, "method": run.method, "train": run.train}
    owners |= {"data_options": run.data_options, "hardware": run.hardware}
    tree: dict = {"recipe": run.recipe}
    for key in keys():
        section, _, leaf = key.rpartition(".")
        owner = owners[section] if section else run.engine if leaf in _ENGINE_TOP else run
        value = None if section == "engine" and leaf in run.auto_tiers else getattr(owner, leaf, None)
        if key == "engine.nvme_dir" and value == _default_nvme_dir(run.out):
            value = None  # follows the folder when it is moved
        if leaf in ("data", "eval_data"):
            value = [{"path": source.path, "weight": source.weight} for source in value]
        put(tree, key, _plain(value))
    for section, option in (("method", run.method.name), ("optimizer", name), ("hardware", run.hardware.name)):
        tree[section]["name"] = str(option)
    return tree


def to_yaml(run: RunConfig) -> str:
    import yaml

    return yaml.safe_dump(to_tree(run), sort_keys=False, allow_unicode=True, width=120)


def read_tree(path: Path) -> dict:
    """The tree of a run folder's config.yaml. Raises ZftError where there is none."""
    if not path.is_file():
        raise ZftError(f"{path.parent} is not a run folder: it has no {path.name}")
    tree, complete = read_yaml(path), defaults()
    for key in keys():
        section = key.rpartition(".")[0]
        if key.rpartition(".")[2] not in (tree.get(section, {}) if section else tree):
            put(tree, key, get(complete, key))
    return tree


def read_yaml(path: Path) -> dict:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _optimizer(section: OptimizerSection, lr: float | None, weight_decay: float, problems: list[str]) -> config.Optim:
    cls, fixed = OPTIMIZERS[section.name]
    known = {field.name for field in fields(cls)}
    given = {name: value for name in ("betas", "eps", "momentum") if (value := getattr(section, name)) is not None}
    problems += [
        f"optimizer.{name}={value} has no meaning for optimizer={section.name}; leave it out"
        for name, value in given.items() if name not in known
    ]  # fmt: skip
    given = {name: value for name, value in given.items() if name in known}
    return cls(**({"lr": lr} if lr is not None else {}), weight_decay=weight_decay, **fixed, **given)


def _dataclass(cls: type, values: dict):
    """`cls` with strings turned into the enums that its defaults are."""
    values = _tuples(values)
    for field in fields(cls):
        if field.name in values and isinstance(field.default, StrEnum):
            values[field.name] = type(field.default)(values[field.name])
    return cls(**values)


def _tuples(values: dict) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _default_out(tree: dict, cwd: Path) -> str:
    model = re.sub(r"[^\w.-]+", "-", Path(tree["model"]).name.removesuffix(".gguf")).strip("-") or "model"
    return str(cwd / "runs" / f"{Path(tree['recipe']).stem}-{model}-{time.strftime('%Y%m%d-%H%M%S')}")


def _default_nvme_dir(out: str) -> str:
    return str(Path(out) / "tiers")


def raise_all(problems: list[str]) -> None:
    if problems:
        raise ZftError("; ".join(dict.fromkeys(problems)))
