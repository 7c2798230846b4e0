"""Cases i: reading, rendering, masking, cutting and packing of data."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.fixtures.data.tokenizers import bpe_tokenizer
from tests.tiny import tiny_folder, tiny_model
from zft.cli import main
from zft.config import ZftError
from zft.data import DataOptions, OnError, Truncate, prepare
from zft.data.collate import packed, padded


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(prompt: str = "the a", answer: str = "of and") -> dict:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def long_chat(turns: int) -> dict:
    return {"messages": [message for _ in range(turns) for message in chat()["messages"]]}


def targets(tokenizer, store, row: int = 0) -> str:
    return tokenizer.decode(store.ids(row)[store.mask(row) == 1])


# 68


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    ("style", "count"), [("llama3", 1), ("mistral", 1), ("gemma", 1), ("chatml", 0), ("qwen3", 0), ("phi", 0)]
)
def test_68_one_bos(style, count, adds_bos, tmp_path):
    """A chat is rendered once: its ids are `apply_chat_template`'s, with the template's BOS and no second one.

    Not reported: several turns, and plain text that begins with the BOS token already.
    """
    tokenizer = bpe_tokenizer(style, adds_bos=adds_bos)
    rows = [chat(), long_chat(3)]
    store = prepare(write(tmp_path / "a.jsonl", rows), tokenizer, seq_len=128).epochs.store
    for number, row in enumerate(rows):
        ids = store.ids(int(np.flatnonzero(store.rows == number)[0])).tolist()
        assert ids == tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert ids.count(tokenizer.bos_token_id) == count if tokenizer.bos_token else count == 0
    if count and adds_bos:
        texts = [{"text": "the a of"}, {"text": tokenizer.bos_token + "the a of"}]
        store = prepare(write(tmp_path / "b.jsonl", texts), tokenizer, seq_len=128).epochs.store
        assert store.ids(0).tolist() == store.ids(1).tolist()
        assert store.ids(0).tolist().count(tokenizer.bos_token_id) == 1


# 69

BARE = "{% for m in messages %}{{ m['role'] ~ ':' ~ m['content'] ~ eos_token }}{% endfor %}"
UNMASKABLE = BARE + "{% if add_generation_prompt %}{{ 'G' }}{% endif %}"
EMPTY_MARKS = "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}"


def test_69_a_template_without_generation_tags(tmp_path):
    """Without generation tags the answers are found by rendering prefixes; a template where that fails is named.

    Not reported: tags around nothing, and an answer of no characters.
    """
    tokenizer = bpe_tokenizer("chatml")
    path = write(tmp_path / "a.jsonl", [chat(), long_chat(2)])
    assert "generation %}" not in tokenizer.chat_template
    store = prepare(path, tokenizer, seq_len=64).epochs.store
    assert targets(tokenizer, store) == "of and<|im_end|>" and targets(tokenizer, store, 1) == "of and<|im_end|>" * 2
    for template, said in ((UNMASKABLE, "no answer range: .*is no prefix"), (EMPTY_MARKS, "marks no text with")):
        (tmp_path / "odd.jinja").write_text(template)
        options = DataOptions(chat_template=str(tmp_path / "odd.jinja"))
        with pytest.raises(ZftError, match=rf"a.jsonl:1: .*odd.jinja.*{said}|a.jsonl:1: {said}"):
            prepare(path, bpe_tokenizer("chatml"), options, seq_len=64)
    tokenizer = bpe_tokenizer("chatml")
    nothing = prepare(write(tmp_path / "b.jsonl", [chat(), chat(answer="")]), tokenizer, seq_len=64)
    assert nothing.report.rows + nothing.report.dropped_rows == 2
    assert all(nothing.epochs.store.mask(i).any() for i in range(nothing.report.sequences))


# 71


@pytest.mark.parametrize("style", ["llama3", "chatml", "mistral", "phi"])
@pytest.mark.parametrize("turns", [1, 2])
def test_71_the_end_is_a_target_unless_it_is_cut_off(style, turns, tmp_path):
    """An uncut row ends with a supervised EOS, a cut one gets none invented, and a larger maximum changes nothing.

    Not reported: a cut that takes away the end of turn alone, and one inside of an earlier answer.
    """
    path, reference = write(tmp_path / "a.jsonl", [long_chat(turns)]), None
    tokenizer = bpe_tokenizer(style)
    rendered = tokenizer.apply_chat_template(long_chat(turns)["messages"], return_dict=False)
    uncut = prepare(path, tokenizer, seq_len=4096).epochs.store
    last = int(np.flatnonzero(uncut.mask(0))[-1])
    assert uncut.ids(0)[last] in tokenizer.all_special_ids and uncut.ids(0).tolist() == rendered
    for seq_len in (len(rendered), len(rendered) + 1, 1000, 100_000):
        store = prepare(path, tokenizer, seq_len=seq_len).epochs.store
        reference = reference or (uncut.ids(0).tolist(), uncut.mask(0).tolist())
        assert (store.ids(0).tolist(), store.mask(0).tolist()) == reference
    for seq_len in range(2, last + 1):
        kept = rendered[:seq_len]
        if not uncut.mask(0)[1:seq_len].any():
            with pytest.raises(ZftError, match="no target within seq_len"):
                prepare(path, tokenizer, seq_len=seq_len)
            continue
        store = prepare(path, tokenizer, seq_len=seq_len).epochs.store
        assert store.ids(0).tolist() == kept, "nothing is appended to a cut row"
        assert store.mask(0).tolist() == uncut.mask(0)[:seq_len].tolist()


# 72


def documents(*lengths: int) -> list:
    rng = np.random.default_rng(1)
    return [(rng.integers(5, 60, n).astype(np.int32), np.asarray([0] + [1] * (n - 1))) for n in lengths]


def loss(model, batch: dict) -> float:
    batch = dict(batch)
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    logits, labels = logits[:, :-1].double().flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3", "qwen3_moe"])
def test_72_packed_rows_do_not_see_each_other(attention, arch):
    """The loss of packed rows is the sum of the rows' own losses, and a row's first token is no target.

    Not reported: sliding windows and experts, a row of one token, packs of different lengths in a batch.
    """
    model = tiny_model(arch, attn_implementation=attention)
    rows = documents(5, 9, 2, 12)
    together = packed([rows], 0, flat=False)
    assert (together["labels"][0, np.cumsum([0, 5, 9, 2])] == -100).all()
    separate = sum(loss(model, padded([document], 0)) for document in rows)
    assert abs(loss(model, together) - separate) <= 1e-5 * separate
    blind = {**together, "attention_mask": torch.ones_like(together["input_ids"])}  # the reported fault
    assert abs(loss(model, blind) - separate) > 1e-3
    odd = [documents(1, 20, 1, 3), documents(7), documents(2, 1)]
    separate = sum(loss(model, padded([document], 0)) for pack in odd for document in pack)
    assert abs(loss(model, packed(odd, 0, flat=False)) - separate) <= 1e-5 * separate
    assert abs(loss(model, packed(odd, 0, flat=True)) - separate) <= 1e-5 * separate


# 74


@pytest.mark.parametrize(
    "roles",
    ["user,user,assistant", "assistant,user,assistant", "", "user", "user,assistant,assistant", "critic,assistant"],
)
def test_74_roles(roles, tmp_path):
    """A conversation that the template refuses is an error before training, with its row number and its roles.

    Not reported: two answers in a row, and a role that nobody knows.
    """
    messages = [{"role": role, "content": "a"} for role in roles.split(",") if role]
    path = write(tmp_path / "a.jsonl", [chat(), {"messages": messages}])
    with pytest.raises(ZftError, match=rf"a.jsonl:2: .*({roles or 'empty|no messages'}|role '{roles.split(',')[0]}')"):
        prepare(path, bpe_tokenizer("mistral"), seq_len=64)
    report = prepare(path, bpe_tokenizer("mistral"), DataOptions(on_error=OnError.skip), seq_len=64).report
    assert report.rows == 1 and report.dropped_rows == 1


@pytest.mark.parametrize("style", ["gemma", "chatml"])
def test_74_system_turns(style, tmp_path):
    """A system turn that a template refuses is an error naming `fold_system`, which folds it into the user's turn."""
    system = {"messages": [{"role": "system", "content": "be it"}, *chat()["messages"]]}
    path, tokenizer = write(tmp_path / "a.jsonl", [system]), bpe_tokenizer(style)
    if style == "gemma":
        with pytest.raises(ZftError, match="a.jsonl:1: system turn refused.*fold_system"):
            prepare(path, tokenizer, seq_len=64)
    folded = prepare(path, tokenizer, DataOptions(fold_system=True), seq_len=64)
    text = tokenizer.decode(folded.epochs.store.ids(0))
    assert folded.report.rows == 1 and "be it" in text and "the a" in text
    assert targets(tokenizer, folded.epochs.store).startswith("of and")


# 75


@pytest.mark.parametrize("pack", [False, True])
def test_75_long_rows(pack, tmp_path):
    """Rows longer than seq_len are dropped, cut or refused as asked, counted each time; nothing left is an error.

    Not reported: the same while packing, and a row that is too long by one token.
    """
    path = write(tmp_path / "a.jsonl", [chat()] * 6 + [chat(answer="of and to " * 30)] * 2)
    tokenizer = bpe_tokenizer("chatml")
    drop = prepare(path, tokenizer, DataOptions(truncate=Truncate.drop, pack=pack), seq_len=32).report
    assert (drop.rows, drop.dropped, drop.cut) == (6, {"longer than seq_len": 2}, 0)
    cut = prepare(path, tokenizer, DataOptions(truncate=Truncate.cut, pack=pack), seq_len=32).report
    assert (cut.rows, cut.cut, cut.lengths["max"], cut.dropped) == (8, 2, 32, {})
    with pytest.raises(ZftError, match="8 longer than seq_len"):
        prepare(path, tokenizer, DataOptions(truncate=Truncate.drop, pack=pack), seq_len=4)
    with pytest.raises(ZftError, match="a.jsonl:7: too long"):
        prepare(path, tokenizer, DataOptions(truncate=Truncate.error, pack=pack), seq_len=32)
    exact = len(tokenizer.apply_chat_template(chat()["messages"], return_dict=False))
    for seq_len, cut_rows, length in ((exact, 2, exact), (exact - 1, 8, exact - 1)):
        report = prepare(path, tokenizer, DataOptions(truncate=Truncate.cut, pack=pack), seq_len=seq_len).report
        assert (report.rows, report.cut, report.lengths["max"]) == (8, cut_rows, length)


# 76

GOOD = json.dumps(chat()).encode()


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (b'{"messages": "\xff"}', "not UTF-8"),
        (b'{"messages": [', "broken JSON"),
        (b"[1, 2]", "not an object"),
        (GOOD + GOOD, "broken JSON"),
        (b'{"messages": 7}', None),
    ],
)
def test_76_broken_lines(bad, kind, tmp_path):
    """A line that can't be read is named by file, line and reason, wherever it stands; blank lines are no rows.

    Not reported: two objects in a line, and a number where messages should be.
    """
    tokenizer = bpe_tokenizer("chatml")
    for number, lines in enumerate(([GOOD, b"", bad, GOOD], [bad, GOOD, b"   ", GOOD])):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        line = lines.index(bad) + 1
        with pytest.raises(ZftError, match=rf"{number}.jsonl:{line}: {kind or ''}"):
            prepare(str(path), tokenizer, seq_len=64)
        if kind or number == 0:
            report = prepare(str(path), tokenizer, DataOptions(on_error=OnError.skip), seq_len=64).report
            assert report.rows == 2 and sum(report.dropped.values()) == 1
            assert kind is None or report.dropped == {kind: 1}


def test_76_content_is_never_read_as_a_schema(tmp_path):
    """Content that looks like JSON, numbers, dates or nothing stays the text it is, in any order of the rows."""
    tokenizer = bpe_tokenizer("chatml")
    contents = ['{"role": "user"}', "[1, 2]", "7", "1.50", "true", "null", "2024-01-01", "007", "NaN"]
    rows = [chat(prompt=text, answer=text) for text in contents]
    found = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        prepared = prepare(write(tmp_path / f"{name}.jsonl", order), tokenizer, seq_len=128)
        store = prepared.epochs.store
        found.append([targets(tokenizer, store, i) for i in range(len(order))])
    assert found[0] == found[1][::-1] == [text + "<|im_end|>" for text in contents]
    with open(tmp_path / "c.csv", "w", newline="") as file:
        csv.writer(file).writerows([("prompt", "completion"), *((text, n) for n, text in enumerate(contents))])
    store = prepare(str(tmp_path / "c.csv"), tokenizer, seq_len=128).epochs.store
    for number, text in enumerate(contents):
        assert tokenizer.decode(store.ids(number), skip_special_tokens=True) == f"{text}{number}"


# 78


@pytest.mark.parametrize(("rows", "workers"), [(1, 10), (2, 3), (130, 500), (1, 0)])
def test_78_more_workers_than_rows(rows, workers, tmp_path):
    """More workers than rows, or than there are processors, are as many as are of use.

    Not reported: no worker at all, and more workers than a machine can start.
    """
    path = write(tmp_path / "a.jsonl", [chat(answer=f"of {n}") for n in range(rows)])
    prepared = prepare(path, bpe_tokenizer("chatml"), DataOptions(num_workers=workers), seq_len=64)
    alone = prepare(path, bpe_tokenizer("chatml"), DataOptions(num_workers=0), seq_len=64)
    assert prepared.report.rows == rows
    for number in range(rows):
        assert prepared.epochs.store.ids(number).tolist() == alone.epochs.store.ids(number).tolist()


# 79


@pytest.mark.parametrize(("rows", "share"), [(1, 0.1), (1, 0.9), (4, 0.1), (2, 0.99)])
def test_79_too_few_rows_to_split(rows, share, tmp_path):
    """A share of the rows that leaves none to evaluate or none to train is zft's own error, with the numbers.

    Not reported: a share that leaves nothing to train on, and one that rounds to no row.
    """
    path = write(tmp_path / "a.jsonl", [chat()] * rows)
    said = rf"eval_share={share} of {rows} rows leaves \d+ for evaluation and \d+ for training; give more"
    with pytest.raises(ZftError, match=said):
        prepare(path, bpe_tokenizer("chatml"), DataOptions(eval_share=share), seq_len=64)


def test_79_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    """The split is checked before a weight is looked for: the model here has none."""
    base = tiny_folder("llama", tmp_path / "model")
    (base / "model.safetensors").unlink()
    write(tmp_path / "a.jsonl", [chat(prompt="a", answer="b")])
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["run", "sft", "model=model", "data=a.jsonl", "out=out", "data_options.eval_share=0.1"]) == 2
    error = capsys.readouterr().err
    assert "eval_share=0.1 of 1 rows" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
