"""Rows → examples: which format a row has, and what it says in it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from zft.config import ZftError
from zft.data.errors import RowDropped, RowError, shorten
from zft.data.messages import Turns, check_roles, read_message, read_tools, read_turns
from zft.data.options import Format

# zft's column → names that people use for it
COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat"),
    "instruction": ("instruction",), "input": ("input", "context"), "output": ("output", "response"),
    "history": ("history",), "system": ("system", "system_prompt"), "tools": ("tools", "functions"),
    "prompt": ("prompt", "query", "question"), "completion": ("completion", "response", "answer"),
    "chosen": ("chosen",), "rejected": ("rejected",), "label": ("label", "kto_tag"),
    "text": ("text", "content"),
}  # fmt: skip


@dataclass
class Example:
    """What is trained on: a conversation, or plain text after an untrained prompt (also plain)."""

    where: str
    turns: Turns | None = None
    tools: list[dict] | None = None
    prompt: str = ""
    text: str = ""
    document: bool = False  # a document, or a piece of one
    begins: bool = True
    ends: bool = True


def check_columns(columns: dict[str, str]) -> None:
    """Raises ZftError for a name in `data_options.columns` that zft doesn't know."""
    for name in columns:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(COLUMNS)}"
            raise ZftError(f"data_options.columns: unknown name {name!r}; {hint} (write {{zft's name: your column}})")


class Row:
    """A row's columns under zft's names."""

    def __init__(self, row: dict, columns: dict[str, str]) -> None:
        self.row, self.columns = row, columns

    def get(self, name: str) -> object:
        """The column's value; None where it is absent or null."""
        if name in self.columns:
            return self.row.get(self.columns[name])
        return next((self.row[alias] for alias in COLUMNS[name] if self.row.get(alias) is not None), None)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def need(self, name: str) -> object:
        value = self.get(name)
        if value is None:
            wanted = self.columns.get(name) or " or ".join(COLUMNS[name])
            raise RowError("missing column", f"no {wanted}; the row has {shorten(', '.join(map(str, self.row)), 120)}")
        return value

    def string(self, name: str, optional: bool = False) -> str:
        value = (self.get(name) or "") if optional else self.need(name)
        if isinstance(value, bool | int | float):
            value = str(value)
        if not isinstance(value, str):
            raise RowError("wrong type", f"column {name} has to be text, got {shorten(repr(value))}")
        return value


def detect(row: Row) -> Format:
    """The format that a row's columns tell. Raises RowError when none fits."""
    if row.has("chosen") and row.has("rejected"):
        return Format.preference
    chat = isinstance(row.get("messages"), list)
    answered = row.has("instruction") and row.has("output")
    completed = row.has("prompt") and row.has("completion")
    if _is_label(row.get("label")) and (chat or answered or completed):
        return Format.unpaired
    if chat:
        first = next(iter(row.get("messages")), None)
        return Format.sharegpt if isinstance(first, dict) and "from" in first else Format.messages
    if answered:
        return Format.alpaca
    if completed:
        return Format.prompt_completion
    if row.has("text"):
        return Format.text
    names = shorten(", ".join(map(str, row.row)), 120)
    raise RowError("unknown format", f"columns {names} fit none; name them with data_options.columns and .format")


def _is_label(value: object) -> bool:
    return isinstance(value, bool) or value in (0, 1) or str(value).lower() in ("true", "false", "good", "bad")


def convert(row: Row, form: Format, where: str) -> Example:
    """Read a row of a known format. Raises RowError for a bad row, RowDropped for one that is left out by rule."""
    if form in (Format.messages, Format.sharegpt):
        return _chat(row, where, read_turns(row.need("messages"), "messages"))
    if form is Format.alpaca:
        turns = read_turns(_alpaca_prompt(row), "history")
        _append(turns, {"role": "assistant", "content": row.string("output")})
        return _chat(row, where, turns)
    if form is Format.prompt_completion:
        return _prompt_completion(row, where, row.need("completion"))
    if form is Format.preference:
        return _preference(row, where)
    if form is Format.unpaired:
        return _unpaired(row, where)
    text = row.string("text")
    if not text.strip():
        raise RowError("empty text")
    extra = row.row if "begins" in row.row else {}
    return Example(where, text=text, document=True, begins=extra.get("begins", True), ends=extra.get("ends", True))


def _append(turns: Turns, message: dict) -> None:
    item, trained = read_message(message, "the answer")
    turns.messages.append(item)
    turns.trained.append(trained)


def _chat(row: Row, where: str, turns: Turns) -> Example:
    system = row.get("system")
    if isinstance(system, str) and system.strip() and turns.messages and turns.messages[0]["role"] != "system":
        turns.messages.insert(0, {"role": "system", "content": system})
        turns.trained.insert(0, True)
    return Example(where, turns=check_roles(turns), tools=read_tools(row.get("tools")))


def _alpaca_prompt(row: Row) -> list[dict]:
    items: list[dict] = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError("bad history", f"history has to hold [question, answer] pairs, got {shorten(repr(pair))}")
        items += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = [row.string("instruction"), row.string("input", optional=True)]
    return [*items, {"role": "user", "content": "\n".join(part for part in parts if part)}]


def _prompt_completion(row: Row, where: str, completion: object) -> Example:
    prompt = row.get("prompt") if row.has("prompt") else ""
    if isinstance(completion, dict):
        completion = [completion]
    if isinstance(prompt, list) or isinstance(completion, list) or row.has("system"):
        items = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if prompt else []
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        turns = read_turns([*items, *completion], "prompt")
        # the prompt's own answers are context, the completion is what is learnt
        turns.trained[: len(turns.trained) - len(completion)] = [False] * (len(turns.trained) - len(completion))
        return _chat(row, where, turns)
    text = row.string("completion") if row.get("completion") is completion else str(completion)
    if not text:
        raise RowError("empty text", "the completion is empty")
    return Example(where, prompt=row.string("prompt", optional=True), text=text)


def _preference(row: Row, where: str) -> Example:
    chosen = row.need("chosen")
    chosen = [chosen] if isinstance(chosen, dict) else chosen
    if row.has("messages"):
        turns = read_turns(row.get("messages"), "messages")
    elif row.has("instruction"):
        turns = read_turns(_alpaca_prompt(row), "history")
    elif isinstance(chosen, list) and chosen and _opens(chosen[0]):
        return _chat(row, where, read_turns(chosen, "chosen"))
    else:
        return _prompt_completion(row, where, chosen)
    if isinstance(chosen, str):
        chosen = [{"role": "assistant", "content": chosen}]
    for message in read_turns(chosen, "chosen").messages:
        turns.messages.append(message)
        turns.trained.append(True)
    return _chat(row, where, turns)


def _opens(message: object) -> bool:
    """Whether a chosen answer is the whole conversation, prompt included."""
    return isinstance(message, dict) and read_message(message, "chosen")[0]["role"] in ("system", "user")


def _unpaired(row: Row, where: str) -> Example:
    label = row.need("label")
    if not _is_label(label):
        raise RowError("wrong type", f"label has to be true or false, got {shorten(repr(label))}")
    if str(label).lower() not in ("true", "1", "1.0", "good"):
        raise RowDropped("labelled bad")
    if isinstance(row.get("messages"), list):
        return _chat(row, where, read_turns(row.get("messages"), "messages"))
    if row.has("instruction"):
        return convert(row, Format.alpaca, where)
    return _prompt_completion(row, where, row.need("completion"))
