"""Chat messages in any dialect → one form: role, content as a string, reasoning_content, tool_calls, trained or not."""

from __future__ import annotations

import json
from dataclasses import dataclass

from zft.data.errors import RowError, shorten

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool", "function": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip


@dataclass
class Turns:
    """A conversation: `messages` as chat templates read them, `trained[i]` whether message i may be a target."""

    messages: list[dict]
    trained: list[bool]
    trailing: int = 0  # turns after the last answer, left out

    def roles(self) -> str:
        return ",".join(message["role"] for message in self.messages)


def read_turns(items: object, column: str) -> Turns:
    """Normalise a list of messages. Raises RowError for anything that is no message."""
    if not isinstance(items, list):
        raise RowError(
            "not a conversation", f"column {column} has to be a list of messages, got {shorten(repr(items))}"
        )
    messages, trained = [], []
    for number, item in enumerate(items, 1):
        message, weight = read_message(item, f"message {number}")
        last = messages[-1] if messages else None
        if last and last["role"] == message["role"] == "assistant" and message.get("tool_calls"):
            # text and the calls that follow it are one turn of the model
            if not message["content"] and trained[-1] == weight:
                last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]
                continue
        messages.append(message)
        trained.append(weight)
    return Turns(messages, trained)


def check_roles(turns: Turns) -> Turns:
    """Refuse orders that no chat has, and leave out turns after the last answer. Raises RowError with the roles."""
    roles = [message["role"] for message in turns.messages]
    if not roles:
        raise RowError("empty conversation", "it has no message")
    if "assistant" not in roles:
        raise RowError("no assistant turn", f"roles are {turns.roles()}")
    end = len(roles) - roles[::-1].index("assistant")
    turns.trailing = len(roles) - end
    del turns.messages[end:], turns.trained[end:]
    allowed = {None: ("system", "user"), "system": ("user",), "user": ("assistant",),
               "assistant": ("user", "tool"), "tool": ("tool", "assistant", "user")}  # fmt: skip
    before = None
    for role in roles[:end]:
        if role not in allowed[before]:
            follows = f"{role} after {before}" if before else f"{role} first"
            raise RowError("roles out of order", f"{follows}; roles are {','.join(roles)}")
        before = role
    return turns


def read_message(item: object, name: str) -> tuple[dict, bool]:
    """One message and whether it may be trained on."""
    if not isinstance(item, dict):
        raise RowError("not a conversation", f"{name} has to be an object, got {shorten(repr(item))}")
    role = item.get("role", item.get("from"))
    if role is None:
        raise RowError("missing column", f"{name} has neither role nor from, only {', '.join(map(str, item))}")
    kind = ROLES.get(str(role).lower())
    if kind is None:
        raise RowError("unknown role", f"{name} has role {shorten(repr(role))}; known are {', '.join(ROLES)}")
    if kind == "call":
        call = _parse_calls(item.get("content", item.get("value")), name)
        return {"role": "assistant", "content": "", "tool_calls": call}, _is_trained(item, name)
    message = {"role": kind, **_content(item.get("content", item.get("value")), name)}
    calls = message.pop("tool_calls", []) + _listed_calls(item, name)
    if calls:
        message["tool_calls"] = calls
    for key in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(item.get(key), str) and item[key]:
            message.setdefault("reasoning_content", item[key])
    for key in ("name", "tool_call_id"):
        if item.get(key) is not None:
            message[key] = item[key]
    if item.get("content", item.get("value")) is None and not calls and "reasoning_content" not in message:
        raise RowError("missing column", f"{name} has no content")
    return message, _is_trained(item, name)


def _is_trained(item: dict, name: str) -> bool:
    weight = item.get("weight", item.get("train", 1))
    if weight not in (0, 1):
        raise RowError("bad weight", f"{name} has weight {shorten(repr(weight))}; it has to be 0 or 1")
    return bool(weight)


def _content(value: object, name: str) -> dict:
    """content as a string; typed parts are joined, their reasoning and calls taken out."""
    if value is None:
        return {"content": ""}
    if isinstance(value, str):
        return {"content": value}
    if not isinstance(value, list):
        raise RowError("bad content", f"{name}: content has to be a string or a list, got {shorten(repr(value))}")
    text, reasoning, calls = [], [], []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        data = part if isinstance(part, str) else _part_data(part, kind, name)
        if kind in ("text", "input_text", "output_text"):
            text.append(data)
        elif kind in ("reasoning", "thinking"):
            reasoning.append(data)
        elif kind in ("tool_call", "tool_calls", "function_call"):
            calls += _parse_calls(data, name)
        else:
            raise RowError("unknown content", f"{name} has a part of type {shorten(repr(kind))}; zft trains on text")
    out: dict = {"content": "".join(text)}
    if reasoning:
        out["reasoning_content"] = "\n".join(reasoning)
    if calls:
        out["tool_calls"] = calls
    return out


def _part_data(part: object, kind: str, name: str) -> object:
    if isinstance(part, dict):
        for key in (kind, "value", "text", "content"):
            if part.get(key) is not None and (isinstance(part[key], str) or "call" in kind):
                return part[key]
        if not kind.startswith(("text", "input_text", "output_text", "reasoning", "thinking", "tool", "function")):
            return None
    raise RowError("bad content", f"{name} has a part without text: {shorten(repr(part))}")


def _listed_calls(item: dict, name: str) -> list[dict]:
    calls = item.get("tool_calls") or []
    if item.get("function_call"):
        calls = [item["function_call"], *calls]
    return _parse_calls(calls, name) if calls else []


def _parse_calls(value: object, name: str) -> list[dict]:
    """Calls as [{"type": "function", "function": {"name", "arguments": object}}]."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError("broken tool call", f"{name}: {error.msg} in {shorten(value)!r}") from error
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("broken tool call", f"{name}: a call needs a name, got {shorten(repr(call))}")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except json.JSONDecodeError:
                pass  # kept as the text it is
        entry: dict = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if call.get("id") is not None:
            entry["id"] = call["id"]
        calls.append(entry)
    return calls


def read_tools(value: object) -> list[dict] | None:
    """The `tools` column (a list or its JSON text) as function schemas; None where it is absent or empty."""
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError("broken tools", f"{error.msg} in {shorten(value)!r}") from error
    if not value:
        return None
    value = value if isinstance(value, list) else [value]
    for tool in value:
        if not isinstance(tool, dict):
            raise RowError("broken tools", f"a tool has to be an object, got {shorten(repr(tool))}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
