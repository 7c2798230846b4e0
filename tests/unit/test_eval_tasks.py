"""What `zft eval --tasks` asks of lm-eval."""

from __future__ import annotations

import json

import pytest

from zft.commands.eval import _figures, tasks_call
from zft.config import ZftError

KNOWN = ["arc_easy", "hellaswag", "mmlu"]


def test_names_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    asked = tasks_call("a,b=c", ["arc_easy", "mine.yaml"], KNOWN, "cpu")
    assert asked == {
        "model": "hf",
        "model_args": {"pretrained": "a,b=c"},
        "tasks": ["arc_easy", str(tmp_path / "mine.yaml")],
        "device": "cpu",
    }


def test_an_adapter_goes_on_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    asked = tasks_call(str(tmp_path), ["mmlu"], KNOWN, "cuda")
    assert asked["model_args"] == {"pretrained": "org/base", "peft": str(tmp_path)} and asked["device"] == "cuda"


def test_the_numbers_of_a_task():
    row = {"alias": "mine", "sample_len": 2, "acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": 1}
    assert _figures(row) == {"acc": 0.5, "em,strict": 1}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("arc_esy", "has no task 'arc_esy'; did you mean arc_easy?"),
        ("zzz", "lists them"),
        ("gone.yaml", "no file 'gone.yaml'"),
    ],
)
def test_an_unknown_task_is_the_users_mistake(task, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZftError, match="--tasks: ") as caught:
        tasks_call("model", ["mmlu", task], KNOWN, "cpu")
    assert said in str(caught.value)
