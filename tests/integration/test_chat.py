"""`zft chat` says what plain transformers would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.test_cli import refused, zft
from tests.tiny import tiny_folder


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tiny_folder("llama", folder / "model")
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text("recipe: sft\n")
    return folder


def expected(here: Path, text: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    model = AutoModelForCausalLM.from_pretrained(here / "model")
    given = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**given, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_prompt(here):
    result = zft("chat", "model", "--prompt", "a b", "--max-new-tokens", "8", cwd=here)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == expected(here, "a b").strip()
    assert result.stderr == ""


def test_a_conversation(here):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zft", "chat", "model", "--max-new-tokens", "8"]
    result = subprocess.run(
        command, cwd=here, env=environment, input="a b\nc\n", capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert expected(here, "a b").strip() in result.stdout


def test_what_cannot_be_talked_to(here):
    refused(zft("chat", "gone/", "--prompt", "x", cwd=here), "gone/")
    refused(zft("chat", "run", "--prompt", "x", cwd=here), "no export yet")
    refused(zft("chat", "model", "--prompt", "x", "--max-new-tokens", "0", cwd=here), "max-new-tokens")
