"""Every format's fixture: what is detected, what is rendered, what is a target; and every kind of bad row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.fixtures.data.tokenizers import bpe_tokenizer
from zft.config import ZftError
from zft.data import DataOptions, Format, OnError, prepare

HERE = Path(__file__).parents[1] / "fixtures" / "data"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

# file -> (format, rows kept, targets of the first row)
EXPECTED = {
    "messages.jsonl": ("messages", 3, "In tall trees.<|im_end|>In shallow water.<|im_end|>"),
    "messages_parts.jsonl": (
        "messages", 1, f"<think>\nI have to look it up.\n</think>\n\n{CALL}<|im_end|>"
        "<think>\nIt says rain.\n</think>\n\nYes, take a coat.<|im_end|>",
    ),
    "messages_tools.jsonl": ("messages", 2, f"{CALL}<|im_end|>No, it is dry.<|im_end|>"),
    "sharegpt.json": ("sharegpt", 2, "Hello!<|im_end|>"),
    "sharegpt_tools.json": ("sharegpt", 2, f"{CALL}<|im_end|>No.<|im_end|>"),
    "alpaca.json": ("alpaca", 2, "chat<|im_end|>"),
    "alpaca_history.jsonl": ("alpaca", 1, "Two.<|im_end|>Four.<|im_end|>Six.<|im_end|>"),
    "alpaca.csv": ("alpaca", 2, "chat<|im_end|>"),
    "prompt_completion.jsonl": ("prompt_completion", 2, " Lima.<|im_end|>"),
    "prompt_completion_chat.jsonl": ("prompt_completion", 1, "Lima.<|im_end|>"),
    "text.jsonl": ("text", 2, " heron stands in the reeds.<|im_end|>"),
    "text.tsv": ("text", 2, " heron stands.<|im_end|>"),
    "document.txt": (
        "text", 1, "irst line of a document.\nSecond line, with an umlaut: ü.\n\nA new paragraph.\n<|im_end|>"
    ),
    "preference_messages.jsonl": ("preference", 1, "Pears.<|im_end|>"),
    "preference_whole.jsonl": ("preference", 1, "Pears.<|im_end|>"),
    "preference_strings.jsonl": ("preference", 1, "Pears.<|im_end|>"),
    "preference_sharegpt.json": ("preference", 1, "Pears.<|im_end|>"),
    "preference_alpaca.json": ("preference", 1, "Pear.<|im_end|>"),
    "unpaired.jsonl": ("unpaired", 1, "Pears.<|im_end|>"),
    "unpaired_messages.jsonl": ("unpaired", 1, "Pears.<|im_end|>"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer("chatml")


def texts(prepared, tokenizer, sequence: int = 0) -> tuple[str, str]:
    store = prepared.epochs.store
    ids = store.ids(sequence)
    return tokenizer.decode(ids), tokenizer.decode(ids[store.mask(sequence) == 1])


@pytest.mark.parametrize("name", EXPECTED)
def test_fixture(name: str, tokenizer):
    form, rows, targets = EXPECTED[name]
    prepared = prepare(str(HERE / name), tokenizer, seq_len=1000)
    assert (prepared.report.format, prepared.report.rows) == (form, rows)
    assert texts(prepared, tokenizer)[1] == targets


def test_every_fixture_is_named():
    here = {p.name for p in HERE.iterdir() if p.is_file() and p.suffix != ".py"}
    assert here == set(EXPECTED)


def test_whole_renderings(tokenizer):
    def whole(name: str) -> str:
        return texts(prepare(str(HERE / name), tokenizer, seq_len=1000), tokenizer)[0]

    assert whole("alpaca.json") == (
        "<|im_start|>user\nTranslate to French.\ncat<|im_end|>\n<|im_start|>assistant\nchat<|im_end|>\n"
    )
    assert whole("sharegpt.json").startswith("<|im_start|>system\nYou greet.<|im_end|>\n<|im_start|>user\nHi")
    assert whole("preference_whole.jsonl").count("Best fruit?") == 1
    tools = whole("messages_tools.jsonl")
    assert tools.startswith("<|im_start|>system\nYou may call") and '"name": "weather"' in tools
    assert "<|im_start|>user\n<tool_response>\ndry\n</tool_response><|im_end|>" in tools


def test_a_template_with_places_for_tools_and_reasoning_gets_them():
    tokenizer = bpe_tokenizer("qwen3")
    prepared = prepare(str(HERE / "messages_parts.jsonl"), tokenizer, seq_len=2000)
    whole, targets = texts(prepared, tokenizer)
    assert "# Tools\n<tools>\n" in whole and "You may call" not in whole
    assert targets.startswith("<think>\nI have to look it up.\n</think>") and "<tool_call>" in targets
    assert not prepared.report.notes


def test_parquet_and_gzip_equal_jsonl(tmp_path, tokenizer):
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in (HERE / "messages_tools.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb") as file:
        file.write((HERE / "messages_tools.jsonl").read_bytes())
    reference = prepare(str(HERE / "messages_tools.jsonl"), tokenizer, seq_len=1000)
    for name in ("rows.parquet", "rows.jsonl.gz"):
        prepared = prepare(str(tmp_path / name), tokenizer, seq_len=1000)
        assert texts(prepared, tokenizer, 0) == texts(reference, tokenizer, 0)
        assert texts(prepared, tokenizer, 1) == texts(reference, tokenizer, 1)


def test_columns_and_format_can_be_named(tmp_path, tokenizer):
    path = tmp_path / "rows.csv"
    path.write_text("frage,antwort,text\nthe a,of and,no\n")
    options = DataOptions(columns={"instruction": "frage", "output": "antwort"}, format=Format.alpaca)
    prepared = prepare(str(path), tokenizer, options, seq_len=100)
    assert prepared.report.format == "alpaca"
    assert texts(prepared, tokenizer)[1] == "of and<|im_end|>"
    with pytest.raises(ZftError, match=r"unknown name 'instructon'; did you mean 'instruction'\?"):
        prepare(str(path), tokenizer, DataOptions(columns={"instructon": "frage"}), seq_len=100)


U, A, S = ({"role": role, "content": "a"} for role in ("user", "assistant", "system"))
BAD_ROWS = [
    ({"messages": []}, "empty conversation: it has no message"),
    ({"messages": [U]}, "no assistant turn: roles are user"),
    ({"messages": [U, U, A]}, "roles out of order: user after user; roles are user,user,assistant"),
    ({"messages": [A, U, A]}, "roles out of order: assistant first; roles are assistant,user,assistant"),
    ({"messages": [U, S, A]}, "roles out of order: system after user"),
    ({"messages": [U, A, A]}, "roles out of order: assistant after assistant"),
    ({"messages": [U, {"role": "judge", "content": "a"}]}, "unknown role: message 2 has role 'judge'"),
    ({"messages": [U, {"role": "assistant"}]}, "missing column: message 2 has no content"),
    ({"messages": [U, {"content": "a"}]}, "missing column: message 2 has neither role nor from"),
    ({"messages": [U, "a"]}, "not a conversation: message 2 has to be an object"),
    ({"messages": [U, {"role": "assistant", "content": 5}]}, "bad content: message 2: content has to be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, A]},
        "unknown content: message 1 has a part of type 'image'; zft trains on text",
    ),
    ({"messages": [U, A], "tools": "[{"}, "broken tools"),
    ({"messages": "hello"}, "not a conversation: column messages has to be a list"),
    ({"question": "a"}, "missing column: no messages or conversations"),
    ([1, 2], r"not an object: a row is a JSON object, got \[1, 2\]"),
]


@pytest.mark.parametrize("row,reason", BAD_ROWS)
def test_bad_rows_name_file_line_and_reason(row, reason: str, tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    good = {"messages": [U, A]}
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(row)}\n{json.dumps(good)}\n")
    with pytest.raises(ZftError, match=rf"^data: rows.jsonl:3: {reason}.*on_error=skip") as caught:
        prepare(str(path), tokenizer, seq_len=100)
    assert "\n" not in str(caught.value)
    report = prepare(str(path), tokenizer, DataOptions(on_error=OnError.skip), seq_len=100).report
    assert report.rows == 2 and sum(report.dropped.values()) == 1
    assert next(iter(report.dropped)) in reason


def test_string_content_is_never_read_as_schema(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "2024-01-01"}, {"text": "5"}, {"text": "true"}, {"text": '[{"a": 1}]'}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = DataOptions()
    forwards = prepare(str(path), tokenizer, options, seq_len=100)
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    backwards = prepare(str(path), tokenizer, options, seq_len=100)
    assert [texts(forwards, tokenizer, i)[0] for i in range(4)] == [
        texts(backwards, tokenizer, 3 - i)[0] for i in range(4)
    ]
    assert texts(forwards, tokenizer, 3)[0] == '[{"a": 1}]<|im_end|>'
