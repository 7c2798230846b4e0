"""Saving while the next steps compute: what is written is the state of its step, and updates wait where they must."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.faults import faulty
from tests.small_run import digest
from tests.tiny import tiny_model
from zft.api import Engine, EngineConfig, World
from zft.checkpoint import disk
from zft.checkpoint.manifest import Manifest, is_complete
from zft.tiers import direct

CONFIGS = {
    "deferred": {},
    "immediate": {"max_grad_norm": None, "nonfinite": "raise"},
    "nvme": {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"},
}


class HeldDisk(disk.Disk):
    """Its second write waits for `go`."""

    def __init__(self) -> None:
        self.go, self.reached, self.writes = threading.Event(), threading.Event(), 0

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self.writes += 1
        if self.writes == 2:
            self.reached.set()
            assert self.go.wait(60)
        super().write(fd, data, offset)


@pytest.fixture
def small_gathers(monkeypatch):
    monkeypatch.setattr(direct, "BUFFER_BYTES", 16 << 10)


def engine(folder: Path, **settings: object) -> Engine:
    config = EngineConfig(compute_device="cpu", nvme_dir=str(folder / "nvme"), **settings)
    return Engine(tiny_model("llama", attention_dropout=0.1), config, world=World.single("cpu"))


def step(made: Engine, number: int) -> float:
    rows = torch.randint(5, 64, (2, 8), generator=torch.Generator().manual_seed(number))
    batch = {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}
    return made.step([batch], lr=0.01).loss


def reference(folder: Path, settings: dict) -> tuple[bytes, list[float], str]:
    """The file of a save after step 2 that waits; losses and weights of 5 steps without any save."""
    with engine(folder, **settings) as made:
        for number in range(2):
            step(made, number)
        made.save(folder / "waited", {"step": 2})
    with engine(folder, **settings) as made:
        return _file(folder / "waited"), [step(made, number) for number in range(5)], digest(made)


def _file(checkpoint: Path) -> bytes:
    return (checkpoint / "rank-00000-of-00001.safetensors").read_bytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_state_of_its_step_while_others_run(tmp_path, monkeypatch, small_gathers, name):
    file, losses, weights = reference(tmp_path, CONFIGS[name])
    held = HeldDisk()
    monkeypatch.setattr(disk, "DISK", held)
    with engine(tmp_path, **CONFIGS[name]) as made:
        found = [step(made, number) for number in range(2)]
        made.save(tmp_path / "begun", {"step": 2}, wait=False)
        assert held.reached.wait(60)
        assert not made.finish_save(wait=False) and not is_complete(tmp_path / "begun")
        # the copy stands still in the first units: the steps come to where they may not go on
        rest: list[float] = []
        runner = threading.Thread(target=lambda: rest.extend(step(made, number) for number in range(2, 5)))
        runner.start()
        runner.join(3)
        assert runner.is_alive() and len(rest) <= 1, "an update went past a record that is not copied"
        held.go.set()
        runner.join(60)
        assert made.finish_save() and not made.finish_save()
        assert found + rest == losses and digest(made) == weights
    assert _file(tmp_path / "begun") == file
    assert Manifest.read(tmp_path / "begun").train == {"step": 2}
    assert Manifest.read(tmp_path / "begun").engine["step_count"] == 2


def test_without_waiting_updates_the_copy_would_be_wrong(tmp_path, monkeypatch, small_gathers):
    """The guard is what makes the test above pass."""
    file, *_ = reference(tmp_path, CONFIGS["immediate"])
    held = HeldDisk()
    monkeypatch.setattr(disk, "DISK", held)
    with engine(tmp_path, **CONFIGS["immediate"]) as made:
        for number in range(2):
            step(made, number)
        monkeypatch.setattr(made.parts.fetcher.guard, "before_update", lambda group, step: None)
        made.save(tmp_path / "begun", {"step": 2}, wait=False)
        assert held.reached.wait(60)
        step(made, 2)
        held.go.set()
        made.finish_save()
    assert _file(tmp_path / "begun") != file


def test_an_error_in_the_background_is_raised_and_steps_go_on(tmp_path):
    with engine(tmp_path) as made:
        step(made, 0)
        with faulty(4, "full"):
            made.save(tmp_path / "step-00000001", wait=False)
            losses = [step(made, number) for number in range(1, 3)]
            with pytest.raises(OSError, match="No space left"):
                made.finish_save()
        assert not list(tmp_path.glob("*step*"))
        losses.append(step(made, 3))
        made.save(tmp_path / "step-00000004", wait=False)
    with engine(tmp_path) as plain:
        step(plain, 0)
        assert losses == [step(plain, number) for number in range(1, 4)]
    assert not is_complete(tmp_path / "step-00000004"), "closing gives an unfinished save up"


def test_loading_and_exporting_complete_or_respect_a_save(tmp_path, monkeypatch):
    with engine(tmp_path) as made:
        step(made, 0)
        made.save(tmp_path / "a", wait=False)
        before = digest(made)
        step(made, 1)
        assert made.load(tmp_path / "a") == {} and digest(made) == before and made.step_count == 1
        made.save(tmp_path / "a", wait=False)
        made.save(tmp_path / "b")
        assert is_complete(tmp_path / "a") and is_complete(tmp_path / "b")
