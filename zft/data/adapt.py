"""What a chat template can't express is written into the text of the conversation, by stated rules.

Reasoning goes into <think>…</think> at the head of the answer; tools, calls and results take the form of Hermes and
Qwen; a system turn that is refused goes into the first user turn, if asked for. Each use of a rule is counted.
"""

from __future__ import annotations

import json
from collections import Counter

from zft.data.errors import RowError
from zft.data.formats import Example
from zft.data.template import Template

Messages = list[dict]
Tools = list[dict] | None


def adapt(example: Example, template: Template, fold_system: bool, notes: Counter) -> tuple[Messages, Tools]:
    """(messages, tools) that the template can show in full. Raises RowError for a system turn that it refuses."""
    messages, tools = example.turns.messages, example.tools
    has_tools = bool(tools)
    if any(m.get("reasoning_content") for m in messages):
        if not template.mentions(has_tools, "reasoning_content", "thinking"):
            notes["rows: reasoning written as <think>…</think>, the template has no place for it"] += 1
            messages = [_inline_reasoning(message) for message in messages]
        elif not template.mentions(has_tools, "reasoning_content"):
            messages = [_alias_thinking(message) for message in messages]
    speaks = template.mentions(has_tools, "tool_calls")
    listed = tools and not template.mentions(True, "tools")
    if listed or (not speaks and any("tool_calls" in m or m["role"] == "tool" for m in messages)):
        notes["rows: tools and calls written as text (Hermes), the template has no place for them"] += 1
    if not speaks:
        messages = _join_tool_results([_inline_calls(message) for message in messages])
    if listed:
        first = messages[0]["role"] == "system"
        head = messages[0]["content"] + "\n\n" if first else ""
        system = {"role": "system", "content": head + _hermes_tools(tools)}
        messages, tools = [system, *messages[first:]], None
    if messages[0]["role"] == "system":
        messages = _accept_system(messages, tools, template, fold_system, notes)
    return messages, tools


def _accept_system(messages: Messages, tools: Tools, template: Template, fold: bool, notes: Counter) -> Messages:
    """A template may refuse a system turn, or leave it out without a word."""
    system = messages[0]["content"].strip()
    try:
        shown = system in template.render(messages[:2], tools)
        reason = f"{template.name} leaves the system turn out"
    except RowError as error:
        template.render(messages[1:2], tools)  # refuses for another reason: that one is the row's error
        shown, reason = False, error.detail
    if shown:
        return messages
    if not fold:
        raise RowError("system turn refused", f"{reason}; data_options.fold_system=true puts it into the user's turn")
    notes["rows: system turn folded into the first user turn"] += 1
    first = messages[1]
    return [{**first, "content": f"{system}\n\n{first['content']}"}, *messages[2:]]


def _inline_reasoning(message: dict) -> dict:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}"}


def _alias_thinking(message: dict) -> dict:
    if not message.get("reasoning_content"):
        return message
    return {**message, "thinking": message["reasoning_content"]}


def _inline_calls(message: dict) -> dict:
    if "tool_calls" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    text = message["content"]
    gap = "" if not text or text.endswith("\n") else "\n"
    return {**rest, "content": text + gap + "\n".join(map(_hermes_call, message["tool_calls"]))}


def _join_tool_results(messages: list[dict]) -> list[dict]:
    """Tool results as user turns; several in a row, and a user turn after them, become one."""
    out: list[dict] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
        elif message["role"] == "user" and out and out[-1].get("results"):
            text = message["content"]
        else:
            out.append(message)
            continue
        if out and out[-1].get("results"):
            out[-1] = {**out[-1], "content": out[-1]["content"] + "\n" + text}
        else:
            out.append({"role": "user", "content": text, "results": True})
    return [{key: value for key, value in message.items() if key != "results"} for message in out]


def _hermes_tools(tools: list[dict]) -> str:
    """Tool definitions as a system text, for templates that don't know tools (Hermes' and Qwen's convention)."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _hermes_call(call: dict) -> str:
    """A call as text."""
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
