"""`prepare` as a whole: the policy for long rows, splits, mixtures, cache, workers, report, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.data.tokenizers import bpe_tokenizer
from zft.config import ZftError
from zft.data import DataOptions, OnError, Truncate, prepare, tokenize
from zft.data import store as store_module

WORDS = "the a of and to in is that it was for on are as with his they at be this".split()


@pytest.fixture
def tokenizer():
    return bpe_tokenizer("chatml")


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats(count: int, prompt: int = 3, answer: int = 6) -> list[dict]:
    def text(n: int, words: int) -> str:
        return " ".join(WORDS[(n + i) % 20] for i in range(words)) + f" {n}"

    return [
        {
            "messages": [
                {"role": "user", "content": text(n, prompt)},
                {"role": "assistant", "content": text(n + 1, answer)},
            ]
        }
        for n in range(count)
    ]


def test_long_rows(tmp_path, tokenizer):
    rows = chats(8, answer=4) + chats(2, answer=60)
    path = write(tmp_path / "rows.jsonl", rows)
    full = prepare(path, tokenizer, seq_len=4096)
    lengths = full.epochs.store.lengths
    assert full.report.cut == 0 and lengths.max() > 40

    cut = prepare(path, tokenizer, DataOptions(truncate=Truncate.cut), seq_len=40)
    assert (cut.report.rows, cut.report.cut, cut.report.lengths["max"]) == (10, 2, 40)
    long = int(np.argmax(lengths))
    assert cut.epochs.store.ids(long).tolist() == full.epochs.store.ids(long)[:40].tolist()
    assert cut.epochs.store.ids(long)[-1] != tokenizer.eos_token_id, "a cut row gets no invented EOS"

    drop = prepare(path, tokenizer, DataOptions(truncate=Truncate.drop), seq_len=40)
    assert (drop.report.rows, drop.report.cut, drop.report.dropped) == (8, 0, {"longer than seq_len": 2})

    with pytest.raises(ZftError, match=r"rows.jsonl:9: too long: \d+ tokens, train.seq_len is 40"):
        prepare(path, tokenizer, DataOptions(truncate=Truncate.error), seq_len=40)

    # a larger limit changes nothing where nothing is cut
    larger = prepare(path, tokenizer, seq_len=8192)
    assert (larger.epochs.store._ids == full.epochs.store._ids).all()
    assert (larger.epochs.store._mask == full.epochs.store._mask).all()


def test_split_documents_lose_no_target(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", [{"text": " ".join(WORDS * 20)}, {"text": "the a"}])
    whole = prepare(path, tokenizer, seq_len=4096, method="pretrain")
    pieces = prepare(path, tokenizer, seq_len=32, method="pretrain")
    assert pieces.report.rows == 2 and pieces.report.sequences > 5 and pieces.report.cut == 0
    assert pieces.report.supervised_tokens == whole.report.supervised_tokens
    store, first = pieces.epochs.store, whole.epochs.store.ids(0).tolist()
    mine = np.flatnonzero(store.rows == 0)
    joined = store.ids(mine[0]).tolist()
    for piece in mine[1:]:
        assert store.ids(piece)[0] == joined[-1] and store.mask(piece)[0] == 0
        joined += store.ids(piece)[1:].tolist()
    assert joined == first
    assert pieces.report.packs is not None, "pretraining packs by default"


def test_rows_without_a_target_left(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", chats(3, prompt=60) + chats(5))
    report = prepare(path, tokenizer, seq_len=40).report
    assert report.rows == 5 and report.dropped == {"no target within seq_len": 3} and report.cut == 0
    path = write(tmp_path / "long.jsonl", chats(3, prompt=60))
    with pytest.raises(
        ZftError, match=r"no supervised token: of 3 rows, 3 no target within seq_len .*raise train.seq_len"
    ):
        prepare(path, tokenizer, seq_len=40)
    rows = chats(2)
    for row in rows:
        row["messages"][1]["weight"] = 0
    with pytest.raises(ZftError, match="no supervised token: of 2 rows, 2 no target"):
        prepare(write(tmp_path / "none.jsonl", rows), tokenizer, seq_len=40)
    unpaired = [{**row, "label": False} for row in chats(2)]
    with pytest.raises(ZftError, match="2 labelled bad"):
        prepare(write(tmp_path / "bad.jsonl", unpaired), tokenizer, seq_len=40)


def test_token_ids_outside_the_embedding(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", chats(3))
    highest = int(prepare(path, tokenizer, seq_len=64).epochs.store._ids.max())
    prepare(path, tokenizer, seq_len=64, vocab_size=highest + 1)
    with pytest.raises(
        ZftError, match=rf"rows.jsonl:\d: token outside the embedding: id {highest}, .* has {highest} rows"
    ):
        prepare(path, tokenizer, seq_len=64, vocab_size=highest)


def test_evaluation_rows_are_held_out_before_packing(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", chats(40))
    options = DataOptions(eval_share=0.25, pack=True)
    prepared = prepare(path, tokenizer, options, seq_len=128, seed=3)
    assert (prepared.report.rows, prepared.report.eval_rows) == (30, 10)
    train, held = (set(p.epochs.items.members.tolist()) for p in (prepared, prepared.eval))
    assert not train & held and len(train | held) == 40
    again = prepare(path, tokenizer, options, seq_len=128, seed=3)
    assert set(again.eval.epochs.items.members.tolist()) == held
    other = prepare(path, tokenizer, options, seq_len=128, seed=4)
    assert set(other.eval.epochs.items.members.tolist()) != held
    one = write(tmp_path / "one.jsonl", chats(1))
    with pytest.raises(ZftError, match="eval_share=0.1 of 1 rows leaves 0 for evaluation and 1 for training"):
        prepare(one, tokenizer, DataOptions(eval_share=0.1), seq_len=128)
    given = prepare(path, tokenizer, seq_len=128, eval_data=one)
    assert given.report.rows == 40 and given.eval.report.rows == given.report.eval_rows == 1
    with pytest.raises(ZftError, match="exclude each other"):
        prepare(path, tokenizer, options, seq_len=128, eval_data=one)


def test_turns_of_one_row_stay_on_one_side(tmp_path):
    tokenizer = bpe_tokenizer("qwen3")
    rows = [{"messages": row["messages"] + more["messages"]} for row, more in zip(chats(20), chats(20), strict=True)]
    prepared = prepare(write(tmp_path / "rows.jsonl", rows), tokenizer, DataOptions(eval_share=0.3), seq_len=256)
    store = prepared.epochs.store
    assert len(store) == 40, "each turn is trained where it stands last"
    train, held = (set(store.rows[p.epochs.items.members].tolist()) for p in (prepared, prepared.eval))
    assert not train & held


def test_mixtures(tmp_path, tokenizer):
    a = write(tmp_path / "a.jsonl", chats(30))
    b = write(tmp_path / "b.jsonl", [{"text": f"the a {n}"} for n in range(10)])
    plain = prepare([a, b], tokenizer, seq_len=64)
    assert plain.report.rows == 40 and plain.report.format == "messages, text"
    mixed = prepare([{"path": a, "weight": 0.5}, {"path": b, "weight": 0.5}], tokenizer, seq_len=64)
    sources = mixed.epochs.store.source[mixed.epochs.items.members[mixed.epochs.order(0)]]
    assert np.bincount(sources).tolist() == [20, 20]
    with pytest.raises(ZftError, match="b.jsonl has no weight but others have"):
        prepare([{"path": a, "weight": 0.5}, b], tokenizer, seq_len=64)


def test_cache_is_used_and_never_stale(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "rows.jsonl", chats(5))
    cache, written = tmp_path / "cache", []
    real = tokenize._write
    monkeypatch.setattr(tokenize, "_write", lambda *a: written.append(1) or real(*a))

    def run(count: int, tokenizer=tokenizer, data=path, seq_len=64, **options) -> object:
        written.clear()
        prepared = prepare(data, tokenizer, DataOptions(**options), seq_len=seq_len, cache_dir=cache)
        assert len(written) == count
        return prepared.report.to_dict()

    first = run(1)
    assert run(0) == first
    assert run(0, pack=True)["rows"] == 5  # how rows are batched doesn't change them
    run(1, seq_len=32)
    run(1, train_on="last")
    template, original = tmp_path / "t.jinja", tokenizer.chat_template
    template.write_text(original)
    run(0, chat_template=str(template))
    template.write_text(original.replace("assistant", "helper").replace("user", "asker"))
    run(1, chat_template=str(template), train_on="all")
    tokenizer.chat_template = original
    run(1, tokenizer=bpe_tokenizer("llama3"))
    grown = bpe_tokenizer("chatml")
    grown.add_tokens(["of and"])
    run(1, tokenizer=grown)
    write(tmp_path / "rows.jsonl", chats(6))
    assert run(1)["rows"] == 6
    # a damaged entry is written again
    entry = max((p for p in cache.iterdir()), key=os.path.getmtime)
    (entry / "ids.bin").write_bytes(b"")
    run(1)
    assert not [p for p in cache.iterdir() if p.name.startswith(".tmp")]


def test_cache_keeps_a_bounded_number_of_entries(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(store_module, "KEPT", 3)
    path = write(tmp_path / "rows.jsonl", chats(2))
    stores = [prepare(path, tokenizer, seq_len=64 + n, cache_dir=tmp_path / "cache").epochs.store for n in range(5)]
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert all(len(store.ids(0)) for store in stores), "an evicted store stays readable for who has it open"


def test_nothing_is_left_behind(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = write(tmp_path / "rows.jsonl", [*chats(2), {"messages": []}])
    with pytest.raises(ZftError):
        prepare(path, tokenizer, seq_len=64)
    with pytest.raises(ZftError):
        prepare(path, tokenizer, seq_len=64, cache_dir=tmp_path / "cache")
    prepared = prepare(path, tokenizer, DataOptions(on_error=OnError.skip), seq_len=64)
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    del prepared
    assert not list((tmp_path / "tmp").iterdir()) and not list((tmp_path / "cache").iterdir())


def test_report(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", [*chats(20), {"messages": []}, *chats(2, answer=80)])
    prepared = prepare(path, tokenizer, DataOptions(on_error=OnError.skip, pack=True), seq_len=64)
    facts = json.loads(json.dumps(prepared.report.to_dict()))
    store = prepared.epochs.store
    assert facts["format"] == "messages" and facts["rows"] == facts["sequences"] == 22
    assert facts["tokens"] == store.lengths.sum() and facts["supervised_tokens"] == store.targets.sum()
    assert facts["cut"] == 2 and facts["dropped"] == {"empty conversation": 1} and facts["dropped_rows"] == 1
    assert facts["packs"] == len(prepared.epochs.items)
    assert sum(b["sequences"] for b in facts["histogram"]) == 22
    for low, high, count in prepared.report.histogram:
        assert count == ((store.lengths >= low) & (store.lengths <= high)).sum()
    assert "".join(part["text"] for part in facts["sample"]) == tokenizer.decode(store.ids(0))
    assert [p["text"] for p in facts["sample"] if p["supervised"]] == [
        chats(1)[0]["messages"][1]["content"] + "<|im_end|>"
    ]


def test_report_on_a_terminal_and_as_a_page(tmp_path, tokenizer):
    from rich.console import Console

    rows = [{"messages": [{"role": "user", "content": "<b>[red]the"}, {"role": "assistant", "content": "a & <i>b"}]}]
    report = prepare(write(tmp_path / "rows.jsonl", rows), tokenizer, seq_len=64).report
    console = Console(force_terminal=True, width=100, color_system="standard", record=True)
    with console.capture() as capture:
        console.print(report.render())
    shown = capture.get()
    assert "<b>[red]the" in shown and "\x1b[32ma & <i>b<|im_end|>" in shown
    page = report.html()
    assert "<mark>a &amp; &lt;i&gt;b&lt;|im_end|&gt;</mark>" in page and "<i>b" not in page
    assert "http" not in page and "<script" not in page


def test_bad_arguments(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", chats(2))
    for options, seq_len, reason in [
        (DataOptions(), 1, "train.seq_len has to be at least 2, got 1"),
        (DataOptions(train_on="lastt"), 64, "train_on='lastt': it has to be one of assistant, last, all"),
        (DataOptions(eval_share=1.0), 64, "eval_share has to be in"),
        (DataOptions(chat_template=str(tmp_path / "no.jinja")), 64, "no.jinja' can't be read"),
        (DataOptions(chat_template="{% for m in messages %}"), 64, "is no valid Jinja template"),
    ]:
        with pytest.raises(ZftError, match=reason):
            prepare(path, tokenizer, options, seq_len=seq_len)


def test_a_base_model_needs_a_template(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    tokenizer.chat_template = None
    path = write(tmp_path / "rows.jsonl", chats(2))
    with pytest.raises(ZftError, match="has no chat template; set data_options.chat_template=chatml"):
        prepare(path, tokenizer, seq_len=64)
    prepared = prepare(path, tokenizer, DataOptions(chat_template="chatml"), seq_len=64)
    assert tokenizer.chat_template == prepared.chat_template, "what is trained with is what is exported"
    assert prepared.stop_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    # a tokenizer without <|im_end|> ends turns with its EOS
    llama = bpe_tokenizer("llama3")
    llama.chat_template = None
    ended = prepare(path, llama, DataOptions(chat_template="chatml"), seq_len=64)
    assert ended.stop_ids == [llama.eos_token_id]
    text = write(tmp_path / "text.jsonl", [{"text": "the a"}])
    tokenizer.chat_template = None
    assert prepare(text, tokenizer, seq_len=64).report.rows == 1, "plain text needs none"
