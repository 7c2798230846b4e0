"""Cases e: half-written saves, who renames, data and random state after a resume, other world sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import faulty
from tests.harness import run_ranks, run_ranks_to_end
from tests.small_run import Shuffled, names, train
from zft.train import checkpoints


def run(folder: Path) -> dict:
    return train(folder)


def resumed(folder: Path, steps: int = 3) -> dict:
    return train(folder, steps=steps, resume=True)


def fails_in_the_second_shard(folder: Path) -> None:
    """Rank 1's own file of step 2: its first operation there is number 5 of its log."""
    from zft.dist import World

    fault = faulty(6, "full") if World.from_env("cpu").rank == 1 else faulty(None)
    with fault:
        train(folder)


def test_case_33_a_save_that_fails_half_way_is_never_the_latest(tmp_path):
    whole = run_ranks(2, run, tmp_path / "whole")
    outcomes = run_ranks_to_end(2, fails_in_the_second_shard, tmp_path / "torn", timeout_s=100)
    assert [kind for kind, _ in outcomes] == ["error", "error"], "both ranks raise, nobody hangs"
    assert checkpoints.steps(tmp_path / "torn" / "out" / "checkpoints") == [1]
    assert run_ranks(2, resumed, tmp_path / "torn") == whole, "resumed from step 1; step 2 is saved again"


def renames(folder: Path) -> list[str]:
    with faulty(None) as disk:
        train(folder)
    return [what for name, what in disk.log if name == "rename"]


def test_case_34_one_rank_renames_and_nothing_is_staged_afterwards(tmp_path):
    first, second = run_ranks(2, renames, tmp_path)
    assert len(first) >= 3 and second == []
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("stop", [1, 5], ids=["mid-epoch", "epoch-end"])
def test_case_36_order_and_dropout_after_a_resume(tmp_path, stop):
    """5 rows, 2 a step, dropout 0.1: the second epoch ends after step 5, the first in the middle of step 3."""
    [whole] = run_ranks(1, seven, tmp_path / "whole")
    run_ranks(1, stopped, tmp_path / "parts", stop)
    assert run_ranks(1, resumed, tmp_path / "parts", 7) == [whole]


def seven(folder: Path) -> dict:
    return train(folder, steps=7)


def stopped(folder: Path, stop: int) -> dict:
    return train(folder, f"train.stop_after={stop}", steps=7)


def test_case_37_every_row_once_an_epoch_across_a_resume():
    before, after = Shuffled(0, 1), Shuffled(0, 1)
    seen = [row["input_ids"] for _ in range(2) for row in before.next_step()]
    after.load_state_dict(before.state_dict())
    seen += [row["input_ids"] for _ in range(3) for row in after.next_step()]
    for epoch in (seen[:5], seen[5:]):
        assert sorted(row.tolist() for row in epoch) == sorted(row.tolist() for row in before.rows[:, None])


@pytest.mark.parametrize("ranks", [1, 3])
def test_case_38_another_world_size_goes_on(tmp_path, ranks):
    """Two steps on 2 ranks, the third on others: to float32 rounding what 2 ranks do (the parts are bitwise equal:
    tests/integration/test_resume_elsewhere.py)."""
    [whole, _] = run_ranks(2, fp32, tmp_path / "whole", 3, False)
    run_ranks(2, fp32, tmp_path / "parts", 2, False)
    found = run_ranks(ranks, fp32, tmp_path / "parts", 3, True)
    assert found[0]["losses"][:2] == whole["losses"][:2]
    assert found[0]["losses"][2][1] == pytest.approx(whole["losses"][2][1], abs=1e-6)


def fp32(folder: Path, steps: int, resume: bool) -> dict:
    return train(folder, "precision=fp32", steps=steps, resume=resume)
