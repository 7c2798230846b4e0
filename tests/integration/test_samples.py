"""`samples=N`: the report's answers are those of plain transformers to prompts of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.test_cli import zft
from tests.tiny import tiny_folder, tiny_tokenizer
from zft.compose import compose
from zft.data import DataOptions, prepare
from zft.dist import World
from zft.train import samples

ARGS = "train.seq_len=64 train.steps=3 train.lr=3e-2 train.grad_accum_steps=2 samples=2".split()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    tiny_folder("llama", tmp_path / "model")
    for name, asked in (("chats", "abcd"), ("held", "xyz")):
        rows = [[{"role": "user", "content": f"{c} ?"}, {"role": "assistant", "content": f"{c} {c}"}] for c in asked]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return tmp_path


def greedy(model, tokenizer, text: str) -> str:
    """The plainest decoding: the whole sequence again for each token, until <|im_end|>."""
    asked = [{"role": "user", "content": text}]
    ids = tokenizer(tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))["input_ids"]
    start = len(ids)
    while len(ids) < start + 32 and ids[-1:] != [2] or len(ids) == start:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_before_and_after(method, here):
    given = ["model=model", "data=chats.jsonl", "eval_data=held.jsonl", "out=o", f"method={method}", *ARGS]
    done = zft("run", "sft", *given, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((here / "o" / "report.json").read_text())["samples"]
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    load = AutoModelForCausalLM if method == "full" else AutoPeftModelForCausalLM
    old = AutoModelForCausalLM.from_pretrained(here / "model", dtype=torch.float32).eval()
    new = load.from_pretrained(here / "o" / "export", dtype=torch.float32).eval()
    asked = ["x ?", "y ?"]
    assert [row["before"] for row in found] == [greedy(old, tokenizer, text) for text in asked]
    assert [row["after"] for row in found] == [greedy(new, tokenizer, text) for text in asked]
    assert all(text in row["prompt"] for text, row in zip(asked, found, strict=True))
    assert any(row["before"] != row["after"] for row in found), "three steps change something"
    page = (here / "o" / "report.html").read_text()
    assert "Before and after" in page


def test_prompts_end_where_the_targets_begin(here):
    tokenizer = tiny_tokenizer(64)
    prepared = prepare(str(here / "chats.jsonl"), tokenizer, seq_len=64)
    texts = [tokenizer.decode(ids) for ids in samples.prompts(prepared, 3)]
    assert texts == [f"<|im_start|>user\n{c} ?<|im_end|>\n<|im_start|>assistant\n" for c in "abc"]
    packed = prepare(str(here / "chats.jsonl"), tokenizer, DataOptions(pack=True), seq_len=64)
    assert samples.prompts(packed, 9) == samples.prompts(prepared, 4), "no more than there are"
    (here / "text.txt").write_text("a b c d e f g h " * 5)
    text = prepare(str(here / "text.txt"), tokenizer, seq_len=64, method="pretrain")
    [first, *_] = samples.prompts(text, 1)
    assert "a b c d e f g h".startswith(tokenizer.decode(first, skip_special_tokens=True).strip()) and len(first) == 16


def test_without_room_it_says_so_and_goes_on(here, monkeypatch, capsys):
    run = compose("sft", ["model=model", "data=chats.jsonl", "out=o", "samples=1"], here)
    prepared = prepare(str(here / "chats.jsonl"), tiny_tokenizer(64), seq_len=64)
    monkeypatch.setattr(samples, "_free_bytes", lambda: 1000)
    samples.keep_samples(run, here / "model", prepared, tiny_tokenizer(64), World.single("cpu"))
    assert "samples=1: left out, the whole model needs" in capsys.readouterr().out
