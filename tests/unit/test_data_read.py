"""Readers: files that are broken, odd or big; folders, lists and the Hub."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.data.tokenizers import bpe_tokenizer
from zft.config import ZftError
from zft.data import DataOptions, OnError, json_stream, prepare, read, sources
from zft.data.errors import RowError
from zft.data.read import read_file
from zft.data.sources import find_sources

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def rows_of(path: Path) -> list:
    return [record.error or record.row for record in read_file(path)]


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=6), chunk=st.integers(1, 40),
       indent=st.sampled_from([None, 1]), ascii_only=st.booleans())  # fmt: skip
def test_json_arrays_at_any_chunk_size(rows, chunk, indent, ascii_only):
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    old, json_stream._CHUNK = json_stream._CHUNK, chunk
    try:
        found = list(json_stream.iter_json(io.BytesIO(text.encode("utf-8", "surrogatepass"))))
    except UnicodeDecodeError:
        raise AssertionError("iter_json let a decoding error through") from None
    finally:
        json_stream._CHUNK = old
    if found and isinstance(found[-1][2], RowError):
        assert "UTF-8" in str(found[-1][2]) and not ascii_only  # a lone surrogate can't be written as UTF-8
        return
    assert [value for _, _, value in found] == rows
    assert [number for number, _, _ in found] == list(range(1, len(rows) + 1))


def test_json_names_the_line_of_each_row_and_of_the_break(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n {"text": "a"},\n {"text":\n  "b"},\n {"text": "c" "d"}\n]')
    records = list(read_file(path))
    assert [r.where for r in records[:2]] == ["rows.json:2 (row 1)", "rows.json:3 (row 2)"]
    assert records[2].where == "rows.json:5 (row 3)"
    assert records[2].error.kind == "broken JSON" and records[2].error.fatal
    path.write_text('[{"text": "a"}, {"text": "b"}')
    assert str(rows_of(path)[-1]) == "broken JSON: the file ends inside the array"
    path.write_text('[{"text": "a"} {"text": "b"}]')
    assert str(rows_of(path)[-1]) == "broken JSON: expected ',' or ']' but got '{'"


def test_json_lines_and_wrapped_rows_under_json(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert rows_of(path) == [{"text": "a"}, {"text": "b"}]
    path.write_text('{"version": 1, "data": [{"text": "a"}, {"text": "b"}]}')
    assert rows_of(path) == [{"text": "a"}, {"text": "b"}]
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    assert rows_of(path) == [{"messages": [{"role": "user", "content": "a"}]}]


def test_jsonl_goes_on_after_bad_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "\xff"}\n{"text": \n  \t\n{"text": "z"}')
    records = list(read_file(path))
    assert [r.where for r in records] == [f"rows.jsonl:{n}" for n in (1, 3, 4, 6)]
    assert str(records[1].error) == "not UTF-8: byte 11 of the line"
    assert records[2].error.kind == "broken JSON"
    assert records[3].row == {"text": "z"}


def test_csv_errors(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'text,n\n"two\nlines",1\nbad,\xff\nfew\nok,1,2\nfine,3\n')
    records = list(read_file(path))
    assert records[0].row == {"text": "two\nlines", "n": "1"} and records[0].where == "rows.csv:3"
    assert str(records[1].error) == "not UTF-8" and records[1].where == "rows.csv:4"
    assert "fewer values" in str(records[2].error) and "more values" in str(records[3].error)
    assert records[4].row == {"text": "fine", "n": "3"}
    path.write_text("text\n" + "x" * 300_000 + "\n")
    assert len(rows_of(path)[0]["text"]) == 300_000


def test_a_long_document_comes_in_pieces_that_join(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_TXT_PIECE", 1 << 12)
    path = tmp_path / "book.txt"
    text = "".join(f"line {n} of the book\n" for n in range(600))
    path.write_text(text)
    pieces = rows_of(path)
    assert len(pieces) > 2 and "".join(piece["text"] for piece in pieces) == text
    assert [p["begins"] for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p["ends"] for p in pieces] == [False] * (len(pieces) - 1) + [True]
    tokenizer = bpe_tokenizer("llama3", adds_bos=True)
    store = prepare(str(path), tokenizer, seq_len=4096, method="pretrain").epochs.store
    ids = store._ids[: store.ends[-1]]
    assert (ids == tokenizer.bos_token_id).sum() == 1 and (ids == tokenizer.eos_token_id).sum() == 1


def test_broken_parquet_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 no parquet")
    with pytest.raises(ZftError, match="rows.parquet is not a readable parquet file"):
        rows_of(path)


def test_sources_that_are_not_there(tmp_path):
    options = DataOptions()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "rows.xml").write_text("<a/>")
    (tmp_path / "folder").mkdir()
    for data, reason in [
        (str(tmp_path / "no.jsonl"), "no.jsonl does not exist"),
        (str(tmp_path / "empty.jsonl"), "empty.jsonl is empty"),
        (str(tmp_path / "rows.xml"), "no reader for .*rows.xml"),
        (str(tmp_path / "folder"), "has no data file"),
        ([], "empty list"),
        ([{"weight": 1}], "has no path"),
        ([{"path": "a/b", "weight": -1}], "has to be a positive number, got -1"),
        ([{"path": "a/b", "weight": 1}, "c/d"], "c/d has no weight but others have"),
    ]:
        with pytest.raises(ZftError, match=reason):
            find_sources(data, options)


def test_folders_and_their_splits(tmp_path):
    for name in ("b.jsonl", "a.json", "notes.md", ".hidden.jsonl"):
        (tmp_path / name).write_text("{}")
    assert [f.name for f in find_sources(str(tmp_path), DataOptions())[0].files] == ["a.json", "b.jsonl"]
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("{}")
    source = find_sources(str(tmp_path), DataOptions())[0]
    assert [f.name for f in source.files] == ["train-0.jsonl", "train-1.jsonl"]
    assert source.notes == [f"2 of 5 files of {tmp_path.name} belong to split train"]
    assert [f.name for f in find_sources(str(tmp_path), DataOptions(split="test"))[0].files] == ["test.jsonl"]
    with pytest.raises(ZftError, match="no split 'validation'; it has test, train"):
        find_sources(str(tmp_path), DataOptions(split="validation"))


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_rows(monkeypatch, streaming):
    import datasets

    rows = [{"messages": [{"role": "user", "content": "the", "name": None}, {"role": "assistant", "content": "a"}]}] * 3
    asked = {}

    def load(name, subset, **options):
        asked.update(name=name, subset=subset, **options)
        data = datasets.Dataset.from_list(rows)
        return data.to_iterable_dataset() if options["streaming"] else data

    monkeypatch.setattr(datasets, "load_dataset", load)
    options = DataOptions(streaming=streaming, subset="en", split="train[:3]")
    prepared = prepare("owner/name", bpe_tokenizer("chatml"), options, seq_len=64)
    assert prepared.report.rows == 3
    assert asked == {"name": "owner/name", "subset": "en", "split": "train[:3]", "streaming": streaming}


def test_hub_errors_are_one_line(monkeypatch):
    import datasets

    def gated(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub.\nLog in.")

    monkeypatch.setattr(datasets, "load_dataset", gated)
    with pytest.raises(ZftError, match="a/b is gated: accept the licence .* `hf auth login` or set HF_TOKEN") as caught:
        list(sources._read_hub("a/b", DataOptions()))
    assert "\n" not in str(caught.value)


def test_unreadable_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.mkdir()
    (path / "x.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ZftError):
        find_sources(str(path), DataOptions())


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(json_stream, "_CHUNK", 1 << 14)  # smaller than the smaller file
    tokenizer, peaks = bpe_tokenizer("chatml"), []
    for count in (150, 1500):
        path = tmp_path / f"rows{count}{suffix}"
        lines = [json.dumps({"text": "the a of and to " * 25, "n": n}) for n in range(count)]
        path.write_text("\n".join(lines) if suffix == ".jsonl" else "[" + ",\n".join(lines) + "]")
        prepare(str(path), tokenizer, DataOptions(max_rows=70), seq_len=512)  # warm
        tracemalloc.start()
        prepared = prepare(str(path), tokenizer, seq_len=512)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert prepared.report.rows == count
    # 1350 more rows are 600 KB of text and some MB as tokens with offsets; their index takes 100 bytes each
    assert peaks[1] - peaks[0] < 250_000, peaks


def test_none_readable(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n" * 5)
    with pytest.raises(ZftError, match="none of its first 5 rows can be read; rows.jsonl:1: broken JSON"):
        prepare(str(path), bpe_tokenizer("chatml"), DataOptions(on_error=OnError.skip), seq_len=64)
    path.write_text("\n\n")
    with pytest.raises(ZftError, match="holds no rows"):
        prepare(str(path), bpe_tokenizer("chatml"), seq_len=64)
