"""Every key of the command line, read off the dataclasses of `zft.config`: type, default, doc, choices, range."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from enum import StrEnum
from functools import cache

from zft import config
from zft.config import DataOptions, EngineConfig, Hardware, MethodConfig, RunConfig, Tier, TrainConfig, ZftError

GROUPS = ("method", "engine", "optimizer", "hardware", "experiment")
"""Groups of configs/: `method=lora` takes configs/method/lora.yaml."""

ENGINE_ALIASES = {
    "engine.precision": "precision",
    "engine.activation": "activation",
    "engine.compile": "compile",
    "engine.max_grad_norm": "train.max_grad_norm",
    "engine.seed": "train.seed",
}
"""Fields of EngineConfig that have their key elsewhere; both spellings set the same value."""

AUTO_TIERS = ("param_tier", "state_tier", "grad_tier")
"""Fields of EngineConfig that are null, for the planner to choose, with engine=auto."""


@dataclass(frozen=True)
class OptimizerSection:
    """The keys of `optimizer.*`; null is the optimizer's own default (`zft.config`)."""

    name: str = "adamw"
    betas: tuple[float, float] | None = None
    """Decay rates of the moments; null: adamw 0.9, 0.95; lion 0.9, 0.99."""
    eps: float | None = None
    """Added to adamw's denominator; null: 1e-8."""
    momentum: float | None = None
    """sgd only; null: 0.9."""


@dataclass(frozen=True)
class Key:
    """One key that the command line accepts."""

    name: str
    type: object
    default: object
    doc: str
    choices: tuple[str, ...] | None = None
    low: float | None = None
    high: float | None = None
    is_open: bool = False
    """The bounds themselves are out of range."""

    @property
    def is_path(self) -> bool:
        """Whether the value is a name on disk, taken literally and resolved against the caller's folder."""
        return self.name in _PATHS or self.name.endswith("_dir")

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(kind) in (tuple, list) for kind in _members(self.type))

    def describe(self) -> str:
        """What a value may be, for messages and help."""
        if self.choices:
            return " or ".join(
                [", ".join(self.choices[:-1]), self.choices[-1]] if len(self.choices) > 1 else self.choices
            )
        words = [_WORDS.get(kind, "a list" if self.is_list else "a value") for kind in _members(self.type)]
        above, below = (">", "<") if self.is_open else (">=", "<=")
        bounds = f" {above} {self.low:g}" if self.low is not None else ""
        bounds += f"{' and' if bounds else ''} {below} {self.high:g}" if self.high is not None else ""
        return words[0] + bounds + (" or null" if self.is_optional else "")

    @property
    def is_optional(self) -> bool:
        return self.name == "out" or type(None) in typing.get_args(self.type)

    def check(self, value: object, text: str) -> object:
        """The value in its own type. `text` is what the user wrote. Raises ZftError."""
        if value is None and self.is_optional:
            return None
        for kind in _members(self.type):
            try:
                converted = _convert(kind, value, text)
            except TypeError:
                continue
            numbers = converted if isinstance(converted, list) else [converted]
            if (self.choices is None or converted in self.choices) and all(map(self._in_range, numbers)):
                return converted
        raise ZftError(f"{self.name} must be {self.describe()}, got {text}")

    def _in_range(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        return low < value < high or (not self.is_open and value in (low, high) and math.isfinite(value))


_PATHS = {"model", "data", "eval_data", "out", "method.adapter", "data_options.chat_template"}
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict[str, str]: "a mapping such as {prompt: question}",
    tuple[float, float]: "two numbers such as [0.9,0.95]",
}
_FLOATS = ("float32", "bfloat16", "float16")
_CHOICES = {
    "engine.compute_dtype": ("auto", *_FLOATS),
    "engine.reduce_dtype": ("float32", "bfloat16"),
    "engine.activation_tier": ("cpu", "nvme"),
    "track": ("trackio", "wandb"),
}
_OPEN = {"train.epochs", "train.max_grad_norm", "hardware."}
_RANGES = {
    "nproc": (1, 4096),
    "samples": (0, 8),
    "engine.stage": (0, 3),
    "engine.wave": (1, None),
    "engine.shard_ranks": (1, None),
    "engine.update_threads": (1, None),
    "engine.nvme_threads": (1, None),
    "engine.loss_chunk_bytes": (1, None),
    "engine.timeout_s": (1, None),
    "optimizer.eps": (0, None),
    "optimizer.betas": (0, 1),
    "optimizer.momentum": (0, 1),
    "method.r": (1, None),
    "method.alpha": (0, None),
    "method.dropout": (0, 1),
    "train.steps": (1, None),
    "train.epochs": (0, None),
    "train.micro_batch_size": (1, None),
    "train.grad_accum_steps": (1, None),
    "train.seq_len": (2, None),
    "train.lr": (0, None),
    "train.warmup_steps": (0, None),
    "train.min_lr_ratio": (0, 1),
    "train.weight_decay": (0, None),
    "train.max_grad_norm": (0, None),
    "train.seed": (0, 2**63 - 1),
    "train.save_every": (1, None),
    "train.keep": (1, None),
    "train.eval_every": (1, None),
    "train.stop_after": (1, None),
    "data_options.max_rows": (1, None),
    "data_options.num_workers": (0, None),
    "data_options.eval_share": (0, 1),
    **{f"hardware.{f.name}": (0, None) for f in dataclasses.fields(Hardware) if f.name != "name"},
}


@cache
def keys() -> dict[str, Key]:
    """Every key by its full name, in the order of the help text."""
    found = {}
    sections = (
        ("", RunConfig, ("recipe", "engine", "auto_tiers", "method", "train", "data_options", "hardware")),
        ("", EngineConfig, tuple(f for f in _names(EngineConfig) if f not in ("precision", "activation", "compile"))),
        ("train.", TrainConfig, ()),
        ("data_options.", DataOptions, ()),
        ("method.", MethodConfig, ("name",)),
        ("engine.", EngineConfig, ("optim", *(alias.removeprefix("engine.") for alias in ENGINE_ALIASES))),
        ("optimizer.", OptimizerSection, ("name",)),
        ("hardware.", Hardware, ("name",)),
    )
    for prefix, cls, skipped in sections:
        for key in _section(prefix, cls, skipped):
            found[key.name] = key
    return found


def _section(prefix: str, cls: type, skipped: tuple[str, ...]) -> Iterator[Key]:
    hints, docs = typing.get_type_hints(cls), _docs(cls)
    for field in dataclasses.fields(cls):
        if field.name in skipped:
            continue
        name, kind, default = prefix + field.name, hints[field.name], _default(field)
        if prefix == "engine." and field.name in AUTO_TIERS:
            kind, default = Tier | None, None
        enum = next((m for m in _members(kind) if isinstance(m, type) and issubclass(m, StrEnum)), None)
        doc = docs.get(field.name) or (" ".join((enum.__doc__ or "").split()) if enum else "")
        low, high = _RANGES.get(name, (None, None))
        choices = _CHOICES.get(name) or (tuple(map(str, enum)) if enum else None)
        yield Key(name, kind, default, doc, choices, low, high, name in _OPEN or prefix in _OPEN)


def _convert(kind: object, value: object, text: str) -> object:
    """`value` as plain YAML data of type `kind`. Raises TypeError."""
    if typing.get_origin(kind) is tuple:
        items = list(value) if isinstance(value, list | tuple) else [value]
        inner = typing.get_args(kind)
        if inner[-1] is not Ellipsis and len(items) != len(inner):
            raise TypeError
        return [_convert(inner[0], item, str(item)) for item in items]
    if kind == dict[str, str]:
        if not isinstance(value, dict):
            raise TypeError
        return {str(name): _convert(str, column, str(column)) for name, column in value.items()}
    if kind is str or issubclass(kind, StrEnum):
        if value is None or isinstance(value, list | dict):
            raise TypeError
        return value if isinstance(value, str) else text
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return value


def _default(field: dataclasses.Field) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _members(kind: object) -> list[object]:
    """The types of a union without None; a plain type as a list of one."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return [member for member in typing.get_args(kind) if member is not type(None)]
    return [kind]


@cache
def _docs(cls: type) -> dict[str, str]:
    """The strings under a dataclass's fields."""
    module = ast.parse(inspect.getsource(inspect.getmodule(cls) or config))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    docs = {}
    for node, after in zip(body, body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[node.target.id] = " ".join(str(after.value.value).split())
    return docs
