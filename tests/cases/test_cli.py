"""Cases j: command line and configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_model
from tests.unit.test_loop import FakeEngine, FakeLoader
from zft.api import Engine
from zft.compose import compose
from zft.config import AdamW, EngineConfig, RunConfig, ZftError
from zft.dist import World
from zft.observe.metrics import read
from zft.optim.schedules import lr_at
from zft.train.folder import RunFolder
from zft.train.loop import Job, fit


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    return tmp_path


def config(here: Path, *args: str) -> RunConfig:
    return compose("sft", ["model=model", "data=a.jsonl", "out=out", *args], here)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("learning_rat=1e-4", "train.lr"),
        ("train.warmup_step=3", "train.warmup_steps"),
        ("engine.stat_tier=cpu", "engine.state_tier"),
        ("warmup_steps=3", "train.warmup_steps"),
        ("engine.seq_len=3", "train.seq_len"),
        ("optimizer.lr=3", "train.lr"),
    ],
)
def test_80_a_mistyped_override_names_the_nearest_key(here, override, nearest):
    with pytest.raises(ZftError) as error:
        config(here, override)
    assert override.partition("=")[0] in str(error.value) and nearest in str(error.value)


def test_81_the_schedule_steps_once_an_update(here):
    """Linear decay over 10 updates: the same curve for any accumulation, and nothing is left after the last."""
    curves = []
    for accum in (1, 4):
        run = config(here, "train.steps=10", "train.lr=1", "train.schedule=linear", f"out={accum}",
                     f"train.grad_accum_steps={accum}")  # fmt: skip
        world, folder = World.single("cpu"), RunFolder(run.out)
        with folder.opened(run, False, world):
            pass
        fit(Job(run, FakeEngine(), FakeLoader(None), world, folder), 10)
        curves.append([row["lr"] for row in read(folder.metrics)])
    assert curves[0] == curves[1] == pytest.approx([1.0 - step / 10 for step in range(10)])
    assert lr_at(10, "linear", 1.0, 0, 10) == 0


def test_84_norms_and_biases_are_not_decayed():
    """Without gradients' help (lr x decay alone moves a weight): what is not a matrix keeps its value, also in classes of
    a model's own."""
    for family in ("llama", "gpt2", "gemma2"):
        model = tiny_model(family)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optim = AdamW(lr=1e-3, weight_decay=0.5, eps=1e6)  # the step itself is nothing next to the decay
        engine = Engine(model, EngineConfig(precision="fp32", compute_device="cpu", optim=optim))
        ids = torch.arange(2, 18).reshape(1, 16)
        engine.step([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}])
        for name, value in engine.named_parameters():
            expected = before[name] * (1 - 5e-4) if before[name].dim() > 1 else before[name]
            assert torch.allclose(value, expected, rtol=0, atol=1e-7), (family, name)
        engine.close()


def test_85_a_folder_with_something_in_it_is_refused(here):
    (here / "out").mkdir()
    (here / "out" / "notes.txt").write_text("mine")
    run = config(here)
    with pytest.raises(ZftError, match="not empty.*choose another folder or overwrite=true"):
        RunFolder(run.out).check(run)
    assert [path.name for path in (here / "out").iterdir()] == ["notes.txt"]
