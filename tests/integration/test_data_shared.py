"""The shared real files, with no option set: the report's numbers against a slow reference written apart from zft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.data.tokenizers import bpe_tokenizer
from zft.data import prepare

SHARED = Path(__file__).parents[3] / "shared" / "data"
SEQ_LEN = 2048
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")
HEAD = (
    "You may call one or more functions to assist with the user query.\n\nYou are provided with function signatures "
    "within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a json object with "
    "function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def call(text: str) -> str:
    parsed = json.loads(text)
    found = {"name": parsed["name"], "arguments": parsed["arguments"]}
    return f"<tool_call>\n{json.dumps(found, ensure_ascii=False)}\n</tool_call>"


def with_tools(messages: list[dict], tools: str) -> list[dict]:
    tools = json.loads(tools)
    if not tools:
        return messages
    listed = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    text = HEAD.format("\n".join(json.dumps(t, ensure_ascii=False) for t in listed))
    if messages[0]["role"] == "system":
        return [{"role": "system", "content": messages[0]["content"] + "\n\n" + text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def alpaca(row: dict) -> list[dict]:
    user = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
    return [{"role": "user", "content": user}, {"role": "assistant", "content": row["output"]}]


def glaive(row: dict) -> list[dict]:
    out = []
    for turn in row["conversations"]:
        kind, text = turn["from"], turn["value"]
        role, text = {
            "human": ("user", text), "gpt": ("assistant", text), "function_call": ("assistant", None),
            "observation": ("user", f"<tool_response>\n{text}\n</tool_response>"),
        }[kind]  # fmt: skip
        out.append({"role": role, "content": call(turn["value"]) if text is None else text})
    return with_tools(out, row["tools"])


def dpo(row: dict) -> list[dict]:
    names = {"human": "user", "gpt": "assistant", "system": "system"}
    return [{"role": names[t["from"]], "content": t["value"]} for t in [*row["conversations"], row["chosen"]]]


def reason(row: dict) -> list[dict]:
    out = []
    for message in row["messages"]:
        role, parts = message["role"], message["content"]
        thought = "\n".join(p["value"] for p in parts if p["type"] == "reasoning")
        text = "".join(p["value"] for p in parts if p["type"] == "text")
        calls = [call(p["value"]) for p in parts if p["type"] == "tool_call"]
        if thought:
            text = f"<think>\n{thought}\n</think>\n\n{text}"
        if calls:
            text += ("" if not text or text.endswith("\n") else "\n") + "\n".join(calls)
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        out.append({"role": role, "content": text})
    return with_tools(out, row["tools"])


FILES = {
    "alpaca_en_demo.json": ("alpaca", alpaca),
    "identity.json": ("alpaca", alpaca),
    "glaive_toolcall_en_demo.json": ("sharegpt", glaive),
    "dpo_en_demo.json": ("preference", dpo),
    "reason_tool_use_demo_50.jsonl": ("messages", reason),
    "c4_demo.jsonl": ("text", None),
}


def slow_numbers(name: str, tokenizer) -> dict:
    """rows, tokens, supervised_tokens, cut, dropped: one row at a time, each turn rendered anew."""
    form, convert = FILES[name]
    text = (SHARED / name).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
    out = {"rows": 0, "tokens": 0, "supervised_tokens": 0, "cut": 0, "dropped": 0}
    for row in rows:
        if convert is None:
            ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
            mask = [False] + [True] * (len(ids) - 1)
        else:
            messages = convert(row)
            ids = tokenizer.apply_chat_template(messages, return_dict=False)
            mask = [False] * len(ids)
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    before = tokenizer.apply_chat_template(
                        messages[:number], add_generation_prompt=True, tokenize=False
                    )
                    upto = tokenizer.apply_chat_template(messages[: number + 1], return_dict=False)
                    assert ids[: len(upto)] == upto
                    first = max(0, len(tokenizer(before, add_special_tokens=False)["input_ids"]) - 4)
                    while not tokenizer.decode(ids[:first]).startswith(before):
                        first += 1
                    last = len(upto) - 1 - upto[::-1].index(tokenizer.eos_token_id)
                    mask[first : last + 1] = [True] * (last + 1 - first)
        long = len(ids) > SEQ_LEN
        ids, mask = ids[:SEQ_LEN], mask[:SEQ_LEN]
        if not any(mask):
            out["dropped"] += 1
            continue
        out["rows"] += 1
        out["tokens"] += len(ids)
        out["supervised_tokens"] += sum(mask)
        out["cut"] += long
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_numbers(name: str):
    tokenizer = bpe_tokenizer("chatml")
    report = prepare(str(SHARED / name), tokenizer, seq_len=SEQ_LEN).report.to_dict()
    assert report["format"] == FILES[name][0]
    expected = slow_numbers(name, tokenizer)
    assert {key: report["dropped_rows" if key == "dropped" else key] for key in expected} == expected
