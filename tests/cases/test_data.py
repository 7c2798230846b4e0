"""Reported faults of data preparation, numbered as in the list of cases (kinds a, c and i)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fixtures.data.tokenizers import bpe_tokenizer
from tests.tiny import tiny_model
from zft.config import ZftError
from zft.data import DataOptions, OnError, Truncate, prepare
from zft.data.collate import packed, padded


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(prompt: str = "the a", answer: str = "of and") -> dict:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def sizes(loader) -> list[int]:
    out = []
    while (step := loader.next_step()) is not None:
        out.append(len(step))
    return out


def test_60_fewer_rows_than_ranks(tmp_path):
    prepared = prepare(write(tmp_path / "a.jsonl", [chat()]), bpe_tokenizer("chatml"), seq_len=64)
    assert [sizes(prepared.loader(rank, 3, 2, 1, 1)) for rank in range(3)] == [[1], [0], [0]]


def test_68_one_bos(tmp_path):
    tokenizer = bpe_tokenizer("llama3", adds_bos=True)
    ids = prepare(write(tmp_path / "a.jsonl", [chat()]), tokenizer, seq_len=64).epochs.store.ids(0).tolist()
    assert ids == tokenizer.apply_chat_template(chat()["messages"], return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_69_a_template_without_generation_tags(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    assert "generation %}" not in tokenizer.chat_template
    store = prepare(write(tmp_path / "a.jsonl", [chat()]), tokenizer, seq_len=64).epochs.store
    assert tokenizer.decode(store.ids(0)[store.mask(0) == 1]) == "of and<|im_end|>"


def test_71_eos_is_a_target_unless_cut(tmp_path):
    tokenizer = bpe_tokenizer("llama3")
    path = write(tmp_path / "a.jsonl", [chat()])
    whole = len(tokenizer.apply_chat_template(chat()["messages"], return_dict=False))
    for seq_len in (whole - 1, whole, 4096):
        store = prepare(path, tokenizer, seq_len=seq_len).epochs.store
        assert (store.ids(0)[-1] == tokenizer.eos_token_id) == (seq_len >= whole)
        assert store.mask(0)[-1] == 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_72_packed_rows_do_not_see_each_other(attention):
    rng = np.random.default_rng(1)
    docs = [(rng.integers(5, 60, n).astype(np.int32), np.asarray([0] + [1] * (n - 1))) for n in (5, 9, 2, 12)]
    model = tiny_model("llama", attn_implementation=attention)

    def loss(batch) -> float:
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits[0, :-1].double(), labels[0, 1:], ignore_index=-100, reduction="sum"
        ).item()

    together = packed([docs], 0, flat=False)
    starts = np.cumsum([0, 5, 9, 2])
    assert (together["labels"][0, starts] == -100).all(), "the first token of a row is no target"
    separate = sum(loss(padded([document], 0)) for document in docs)
    assert abs(loss(together) - separate) <= 1e-5 * separate
    blind = packed([docs], 0, flat=False)
    blind["attention_mask"] = torch.ones_like(blind["input_ids"])  # the reported fault: this hides the documents
    assert abs(loss(blind) - separate) > 1e-2


@pytest.mark.parametrize("roles", ["user,user,assistant", "assistant,user,assistant", "", "user"])
def test_74_roles(tmp_path, roles):
    messages = [{"role": role, "content": "a"} for role in roles.split(",") if role]
    path = write(tmp_path / "a.jsonl", [chat(), {"messages": messages}])
    with pytest.raises(ZftError, match=rf"a.jsonl:2: .*{roles}"):
        prepare(path, bpe_tokenizer("mistral"), seq_len=64)


def test_74_system_turn_that_a_template_refuses(tmp_path):
    system = {"messages": [{"role": "system", "content": "be it"}, *chat()["messages"]]}
    path = write(tmp_path / "a.jsonl", [system])
    with pytest.raises(ZftError, match="a.jsonl:1: system turn refused.*fold_system"):
        prepare(path, bpe_tokenizer("gemma"), seq_len=64)
    assert prepare(path, bpe_tokenizer("gemma"), DataOptions(fold_system=True), seq_len=64).report.rows == 1


def test_75_long_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat()] * 6 + [chat(answer="of and to " * 30)] * 2)
    tokenizer = bpe_tokenizer("chatml")
    drop = prepare(path, tokenizer, DataOptions(truncate=Truncate.drop), seq_len=32).report
    assert (drop.rows, drop.dropped) == (6, {"longer than seq_len": 2})
    cut = prepare(path, tokenizer, DataOptions(truncate=Truncate.cut), seq_len=32).report
    assert (cut.rows, cut.cut, cut.lengths["max"]) == (8, 2, 32)
    with pytest.raises(ZftError, match="8 longer than seq_len"):
        prepare(path, tokenizer, DataOptions(truncate=Truncate.drop), seq_len=4)


def test_76_broken_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    good = json.dumps(chat()).encode()
    path.write_bytes(good + b'\n\n{"messages": "\xff"}\n{"messages": [\n' + good + b"\n")
    tokenizer = bpe_tokenizer("chatml")
    with pytest.raises(ZftError, match="a.jsonl:3: not UTF-8"):
        prepare(str(path), tokenizer, seq_len=64)
    report = prepare(str(path), tokenizer, DataOptions(on_error=OnError.skip), seq_len=64).report
    assert (report.rows, report.dropped) == (2, {"not UTF-8": 1, "broken JSON": 1})


def test_78_more_workers_than_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat()])
    assert prepare(path, bpe_tokenizer("chatml"), DataOptions(num_workers=10), seq_len=64).report.rows == 1


def test_79_one_row_to_split(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat()])
    with pytest.raises(ZftError, match="eval_share=0.1 of 1 rows leaves 0 for evaluation"):
        prepare(path, bpe_tokenizer("chatml"), DataOptions(eval_share=0.1), seq_len=64)
