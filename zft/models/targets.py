"""Which modules of a model get an adapter: what the user wrote, matched against what there is.

all-linear                every linear layer by its full name, the output head left out
q_proj, self_attn.q_proj  modules whose name is that or ends in it
layers\\.[01]\\..*q_proj    a pattern (anything that isn't a plain name), matched against full names
experts.gate_up_proj      also matrices that a module holds directly, as fused experts do
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from zft.config import ZftError

ALL_LINEAR = "all-linear"
_PLAIN = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Targets:
    """As PEFT's LoraConfig takes them."""

    modules: list[str]
    """Names as the user wrote them where all are plain, else full names."""
    parameters: list[str]
    """Full names of parameters that no linear layer holds."""


def find_targets(model: nn.Module, wanted: Sequence[str], key: str = "method.targets") -> Targets:
    """Raises ZftError for an entry that matches nothing, with the list of what could match."""
    if not wanted:
        raise ZftError(f"{key} is empty; name modules, or all-linear")
    modules, parameters = adaptable_modules(model), adaptable_parameters(model)
    linear = [name for name in linear_layers(model) if name in modules]
    full, held, plain = {}, {}, True
    for entry in wanted:
        found = linear if entry == ALL_LINEAR else matches(entry, modules)
        inside = [] if found else matches(entry, parameters)
        if not found and not inside:
            raise ZftError(
                f"{key} names {entry!r}, which matches nothing; it could match {ALL_LINEAR}, "
                f"{', '.join(endings([*modules, *parameters]))}, or a pattern over full names such as {next(iter(modules))}"
            )
        plain = plain and entry != ALL_LINEAR and is_plain(entry) and bool(found)
        full |= dict.fromkeys(found)
        held |= dict.fromkeys(inside)
    return Targets(list(dict.fromkeys(wanted)) if plain else list(full), list(held))


def matches(entry: str, names: Iterable[str]) -> list[str]:
    """Names that an entry means: a plain one by its end at a dot, a pattern by the whole name (as PEFT's)."""
    if is_plain(entry):
        return [name for name in names if name == entry or name.endswith(f".{entry}")]
    try:
        pattern = re.compile(entry)
    except re.error as error:
        raise ZftError(f"method.targets holds {entry!r}, which is no pattern ({error})") from error
    return [name for name in names if pattern.fullmatch(name)]


def is_plain(entry: str) -> bool:
    return _PLAIN.fullmatch(entry) is not None


def adaptable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that LoRA knows: linear layers (GPT-2's Conv1D too) and embeddings."""
    return {name: m for name, m in model.named_modules() if isinstance(m, (nn.Embedding, *linear_types()))}


def linear_layers(model: nn.Module) -> list[str]:
    """Full names of the linear layers, without the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [name for name, m in model.named_modules() if isinstance(m, linear_types()) and m is not head]


def adaptable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices (and stacks of them, one for each expert) that other modules than those hold directly."""
    inside = {id(p) for m in adaptable_modules(model).values() for p in m.parameters()}
    return {name: p for name, p in model.named_parameters() if p.dim() in (2, 3) and id(p) not in inside}


def linear_types() -> tuple[type, ...]:
    from transformers.pytorch_utils import Conv1D

    return (nn.Linear, Conv1D)


def endings(names: Iterable[str]) -> list[str]:
    """The last parts of names, each once: q_proj, k_proj, ...; two parts where the last one says little."""
    short = []
    for name in names:
        *parents, last = [part for part in name.split(".") if not part.isdigit()]
        short.append(f"{parents[-1]}.{last}" if last == "weight" or (parents and parents[-1] == "experts") else last)
    return list(dict.fromkeys(short))
