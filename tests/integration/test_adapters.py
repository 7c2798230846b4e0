"""Adapter runs in real processes: run, stop, resume, load with PEFT alone, merge, talk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import batches, engine_config, method, peft_model
from tests.integration.test_cli import refused, zft
from tests.plain import loss_of
from tests.tiny import tiny_folder, tiny_tokenizer
from zft.api import Engine
from zft.observe.metrics import read

ARGS = ["run", "sft", "model=model", "data=chats.jsonl", "train.seq_len=64", "train.grad_accum_steps=2", "method.r=4"]
PEFT_ALONE = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, folder = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
again = model.load_adapter(folder, "again")
own = [key for key in again.missing_keys if ".again." in key]
with torch.no_grad():
    logits = model.eval()(input_ids=torch.arange(5, 21).view(1, 16)).logits
torch.save((own, again.unexpected_keys, logits), "logits.pt")
"""
AUTO_PEFT = """
import sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = AutoTokenizer.from_pretrained(sys.argv[1])("<a>b", return_tensors="pt").input_ids
with torch.no_grad():
    torch.save(model.eval()(input_ids=ids).logits, "logits.pt")
"""
pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path) -> Path:
    tiny_folder("llama", tmp_path / "model")
    words = ["a b", "c d e", "f", "g h a c", "b b", "d a e"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": words[i % 6]},
                {"role": "assistant", "content": words[(5 * i + 1) % 6]},
            ]
        }
        for i in range(12)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def ok(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def python(code: str, *args: object, cwd: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def losses(run: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in read(run / "metrics.jsonl")]


@pytest.mark.parametrize("name", ["dora", "qlora"])
def test_resumed_is_uninterrupted_to_the_last_bit(name, here):
    """Case 29: the adapter goes on from its checkpoint; nothing starts again from the first values."""
    args = [*ARGS, f"method={name}", "train.steps=4", "engine=zero3_nvme"]
    ok(zft(*args, "out=whole", cwd=here))
    ok(zft(*args, "out=parts", "train.stop_after=2", cwd=here))
    stopped = load_file(here / "parts" / "checkpoints" / "step-00000002" / "rank-00000-of-00001.safetensors")
    del stopped["digests"]  # of the file's own tensors
    assert stopped and all("lora_" in key for key in stopped)  # the frozen base is not in it
    ok(zft("resume", "parts", cwd=here))
    assert losses(here / "parts") == losses(here / "whole")
    whole, parts = (here / run / "export" / "adapter_model.safetensors" for run in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    first = read(here / "whole" / "metrics.jsonl")[0]
    assert first["lr"] == 2e-4 and first["traffic_bytes"]["nvme_read"] > 0


def test_peft_alone_loads_what_a_run_exports(here):
    ok(zft(*ARGS, "method=lora", "train.steps=3", "train.lr=0.02", "out=run", "precision=fp32", cwd=here))
    export = here / "run" / "export"
    python(PEFT_ALONE, here / "model", export, cwd=here)
    missing, unexpected, logits = torch.load(here / "logits.pt")
    assert not missing and not unexpected
    model = peft_model(here / "model", export)
    with torch.no_grad():
        assert torch.equal(logits, model.eval()(input_ids=torch.arange(5, 21).view(1, 16)).logits)
    rows = batches(2)
    with Engine.from_pretrained(here / "model", engine_config(), method=method(adapter=str(export))) as engine:
        ours = engine.evaluate(rows)
    tokens = sum(int((mb["labels"][:, 1:] != -100).sum()) for mb in rows)
    with torch.no_grad():
        theirs = sum(float(loss_of(model, mb, tokens)) for mb in rows)
    assert abs(ours.loss - theirs) <= 1e-6

    ok(zft("export", "run", "merged", "--merge", "--dtype", "fp32", cwd=here))
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(here / "merged").eval()
    with torch.no_grad():
        assert (merged(input_ids=torch.arange(5, 21).view(1, 16)).logits - logits).abs().max() <= 1e-5


def test_going_on_from_an_adapter(here):
    ok(zft(*ARGS, "method=rslora", "train.steps=2", "out=first", cwd=here))
    adapter = "method.adapter=first/export"
    ok(zft(*ARGS, "method=rslora", adapter, "train.steps=1", "train.lr=1e-9", "out=second", cwd=here))
    first, second = (load_file(here / run / "export" / "adapter_model.safetensors") for run in ("first", "second"))
    assert first.keys() == second.keys()
    assert all((first[key] - second[key]).abs().max() <= 1e-8 and first[key].any() for key in first)
    refused(zft(*ARGS, "method=lora", adapter, "out=third", cwd=here), "is a rslora adapter")
    assert not (here / "third").exists()


def test_new_tokens_are_trained_saved_and_found_again(here):
    """Case 17: the base stays as it is; who loads the adapter gets the rows from it."""
    tokenizer = tiny_tokenizer(64)
    tokenizer.add_tokens(["<a>", "<b>"])
    tokenizer.save_pretrained(here / "model")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<a><b> a <a>"}]}
    (here / "chats.jsonl").write_text((json.dumps(row) + "\n") * 8)
    ok(zft(*ARGS, "method=lora", "train.steps=3", "train.lr=0.02", "out=run", cwd=here))
    export = here / "run" / "export"
    rows = {key: t for key, t in load_file(export / "adapter_model.safetensors").items() if "trainable_tokens" in key}
    assert {key.rsplit(".", 3)[-3] for key in rows} == {"embed_tokens", "lm_head"}
    assert all(tensor.shape == (2, 32) and not torch.equal(*tensor) for tensor in rows.values())
    python(AUTO_PEFT, export, cwd=here)
    ok(zft("export", "run", "merged", "--merge", "--dtype", "fp32", cwd=here))
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(here / "merged").eval()
    ids = tokenizer("<a>b", return_tensors="pt").input_ids
    with torch.no_grad():
        assert (merged(input_ids=ids).logits - torch.load(here / "logits.pt")).abs().max() <= 1e-5
    said = zft("chat", "run", "--prompt", "a", "--max-new-tokens", "4", cwd=here)
    assert said.returncode == 0 and said.stderr == "", said.stderr


def test_chat_with_an_adapter_says_what_peft_would(here):
    ok(zft(*ARGS, "method=lora", "train.steps=3", "train.lr=0.05", "out=run", cwd=here))
    said = zft("chat", "run/export", "--prompt", "a b", "--max-new-tokens", "8", cwd=here)
    assert said.returncode == 0 and said.stderr == "", said.stderr
    tokenizer, model = tiny_tokenizer(), peft_model(here / "model", here / "run" / "export").eval()
    prompt = [{"role": "user", "content": "a b"}]
    given = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**given, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said.stdout.strip() == expected.strip()


def test_two_ranks_are_one(here):
    args = [*ARGS, "method=lora", "train.steps=2", "precision=fp32"]
    ok(zft(*args, "out=one", cwd=here))
    ok(zft(*args, "out=two", "nproc=2", "train.grad_accum_steps=1", cwd=here))
    one, two = (load_file(here / run / "export" / "adapter_model.safetensors") for run in ("one", "two"))
    assert all((one[key] - two[key]).abs().max() <= 1e-5 for key in one | two)
    assert all(
        torch.allclose(torch.tensor(a), torch.tensor(b))
        for a, b in zip(losses(here / "one"), losses(here / "two"), strict=True)
    )


def test_mistakes_are_one_line_and_leave_nothing(here):
    tiny_folder("llama_tied", here / "tied")
    refused(zft(*ARGS, "method=lora", "method.targets=[lm_head]", "model=tied", "out=o", cwd=here), "share one weight")
    refused(zft(*ARGS, "method=lora", "method.targets=[wq]", "out=o", cwd=here), "matches nothing")
    refused(zft(*ARGS, "method=lora", "method.init=pissa", "out=o", cwd=here), "method.init")
    refused(zft(*ARGS, "method=lora", "method.adapter=gone", "out=o", cwd=here), "no such file or folder")
    refused(zft(*ARGS, "method=lora", "method.adapter=model", "out=o", cwd=here), "adapter_config.json")
    assert not (here / "o").exists()
