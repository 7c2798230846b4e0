"""A process that dies, or a disk that fills up, at every single operation of a save; damaged checkpoints. Nothing is lost.

Each point is a forked child of one warm process, so that all of them take seconds.
"""

from __future__ import annotations

import ast
import os
import pickle
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import KILLED, OPERATIONS, faulty
from tests.harness import run_ranks, run_ranks_to_end
from tests.small_run import STEPS, digest, names, train
from zft.train import checkpoints

ROOT = Path(__file__).parents[2]


def forked(function: Callable[[], Any]) -> Any:
    """The function's result in a child process, or the child's exit status if it died."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome = ("value", function())
        except BaseException:
            outcome = ("error", traceback.format_exc())
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        raw = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        return status
    kind, value = pickle.loads(raw)
    assert kind == "value", value
    return value


def small_gathers() -> None:
    """Several writes for each shard, though the model is tiny."""
    from zft.tiers import direct

    direct.BUFFER_BYTES = 64 << 10


SAVES = 2
"""Steps of the runs that are stopped, each with a save; the second also removes the first."""


def operations_of_a_run(folder: Path) -> list[tuple[str, str]]:
    with faulty(None) as disk:
        train(folder, steps=SAVES)
    return disk.log


def go_on(folder: Path) -> tuple[dict, dict]:
    """Resumed to the same end, and one step further."""
    return train(folder, resume=True, steps=SAVES), train(folder, resume=True, steps=SAVES + 1)


def stop_at_every_operation(folder: Path, kind: str) -> tuple[int, dict[str, int]]:
    """Runs stopped once at every operation of their saves, then resumed. Points, and how many of which operation."""
    small_gathers()
    expected = forked(lambda: (train(folder / "whole", steps=SAVES), train(folder / "longer", steps=SAVES + 1)))
    log = forked(lambda: operations_of_a_run(folder / "counted"))
    assert len(expected[0]["losses"]) == SAVES and expected[0]["steps"] == [SAVES]
    for at, (name, what) in enumerate(log):
        here, point = folder / f"{at}", f"{kind} at {at}: {name} {what}"
        _stop(here, at, kind, name, point)
        # what is there now, before anything mends it
        complete = checkpoints.steps(here / "out" / "checkpoints")
        assert set(complete) <= {1, 2} and (not complete or max(complete) >= finished_saves(log[:at])), point
        assert complete or not finished_saves(log[:at]), point
        resumed = forked(lambda here=here: go_on(here))
        assert isinstance(resumed, tuple), point
        for found, right in zip(resumed, expected, strict=True):
            assert (found["losses"], found["weights"]) == (right["losses"], right["weights"]), point
        assert names(here) == [f"step-{SAVES + 1:08d}"], point
        shutil.rmtree(here)
    return len(log), {name: sum(name == n for n, _ in log) for name in OPERATIONS}


def _stop(here: Path, at: int, kind: str, name: str, point: str) -> None:
    def run() -> str:
        with faulty(at, kind):
            try:
                train(here, steps=SAVES)
            except OSError as error:
                return str(error)
        return "nothing"

    outcome = forked(run)
    if kind == "kill":
        assert outcome == KILLED, f"{point}: {outcome}"
    else:
        assert ("No space left" in outcome) == (name != "close"), f"{point}: {outcome}"


def finished_saves(log: list[tuple[str, str]]) -> int:
    """Saves whose folder has its name, among these operations."""
    return sum(name == "rename" and what.split()[1].startswith(_final(what)) for name, what in log)


def _final(what: str) -> str:
    return str(Path(what.split()[1]).parent / "step-")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "full"])
def test_stopped_at_every_operation(tmp_path, kind):
    [(points, kinds)] = run_ranks(1, stop_at_every_operation, tmp_path, kind, timeout_s=1500)
    assert points > 25
    assert all(kinds.values()), f"an operation of Disk that no save used: {kinds}"


def replace_at_every_operation(folder: Path) -> int:
    """The same checkpoint saved a second time: at any moment there is a whole one of that step, the old or the new."""
    from zft.api import Engine, EngineConfig, World

    small_gathers()

    def save_twice(here: Path, at: int | None) -> list:
        from tests.tiny import tiny_model

        with Engine(tiny_model("llama"), EngineConfig(compute_device="cpu"), world=World.single("cpu")) as engine:
            engine.save(here / "step-00000001", {"save": 1})
            with faulty(at) as disk:
                engine.save(here / "step-00000001", {"save": 2})
            return disk.log

    def look(here: Path) -> tuple:
        from tests.tiny import tiny_model

        with Engine(
            tiny_model("llama", seed=3), EngineConfig(compute_device="cpu"), world=World.single("cpu")
        ) as engine:
            state = engine.load(checkpoints.newest(here))
            engine.save(here / "step-00000001", {"save": 3})
            return state["save"], digest(engine), sorted(path.name for path in here.iterdir())

    log = forked(lambda: save_twice(folder / "counted", None))
    _, weights, _ = forked(lambda: look(folder / "counted"))
    seen = set()
    for at in range(len(log)):
        here = folder / f"{at}"
        assert forked(lambda here=here, at=at: save_twice(here, at)) == KILLED
        number, found, left = forked(lambda here=here: look(here))
        assert found == weights and left == ["step-00000001"], f"{at}: {log[at]}"
        seen.add(number)
    assert seen == {1, 2}
    return len(log)


@pytest.mark.slow
def test_replaced_at_every_operation(tmp_path):
    [points] = run_ranks(1, replace_at_every_operation, tmp_path, timeout_s=600)
    assert points >= 20


def _flip(path: Path, at: float) -> None:
    raw = bytearray(path.read_bytes())
    raw[min(int(at * len(raw)), len(raw) - 1)] ^= 0x04
    path.write_bytes(raw)


def damages() -> dict[str, Callable[[Path], None]]:
    """name -> what happens to a checkpoint folder."""
    shard, manifest = "rank-00000-of-00001.safetensors", "manifest.json"
    found: dict[str, Callable[[Path], None]] = {}
    for name in (shard, manifest):
        for at in (0.0, 0.001, 0.3, 0.5, 0.9, 1.0):
            found[f"byte flipped at {at} of {name}"] = lambda folder, name=name, at=at: _flip(folder / name, at)
        for share in (0.0, 0.5, 0.999):
            found[f"{name} cut to {share}"] = lambda folder, name=name, share=share: os.truncate(
                folder / name, int(share * (folder / name).stat().st_size)
            )
        found[f"{name} removed"] = lambda folder, name=name: (folder / name).unlink()
    found["an empty folder"] = lambda folder: [path.unlink() for path in folder.iterdir()]
    found["another checkpoint's manifest"] = lambda folder: shutil.copy(
        folder.with_name("step-00000001") / manifest, folder / manifest
    )
    return found


def damage_the_newest(folder: Path) -> int:
    """Each kind of damage to the newest of two checkpoints: the run goes on from the other, and ends the same."""
    expected = forked(lambda: train(folder / "whole"))
    made = forked(lambda: train(folder / "made", "train.keep=9", steps=2))
    assert made["steps"] == [1, 2]
    for number, (name, damage) in enumerate(damages().items()):
        here = folder / f"{number}"
        shutil.copytree(folder / "made", here)
        damage(here / "out" / "checkpoints" / "step-00000002")
        resumed = forked(lambda here=here: train(here, resume=True))
        assert isinstance(resumed, dict), name
        assert (resumed["losses"], resumed["weights"]) == (expected["losses"], expected["weights"]), name
        assert names(here) == [f"step-{STEPS:08d}"], name
    return number + 1


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over(tmp_path):
    [tried] = run_ranks(1, damage_the_newest, tmp_path, timeout_s=600)
    assert tried == len(damages())


def train_with_fault(folder: Path, rank: int, at: int, kind: str) -> str:
    import os

    if int(os.environ["RANK"]) != rank:
        train(folder)
        return "finished"
    with faulty(at, kind):
        train(folder)
    return "finished"


def resume_on_ranks(folder: Path) -> dict:
    return train(folder, resume=True)


@pytest.mark.parametrize(("rank", "kind"), [(1, "kill"), (1, "full"), (0, "full")])
def test_one_of_two_ranks_fails_in_its_second_save(tmp_path, rank, kind):
    """Nobody hangs, nobody takes the half-written checkpoint, and both go on."""
    expected = run_ranks(2, resume_on_ranks, tmp_path / "whole")
    per_save = {0: 14, 1: 5}[rank]
    outcomes = run_ranks_to_end(2, train_with_fault, tmp_path / "torn", rank, per_save + 2, kind, timeout_s=100)
    if kind == "kill":
        assert outcomes[1] == ("died", f"ended with exit status {KILLED} and no result")
        assert outcomes[0][0] == "error" and "RankError" in outcomes[0][1]
    else:
        assert [outcome[0] for outcome in outcomes] == ["error", "error"]
        assert "No space left" in outcomes[rank][1] and "RankError" in outcomes[1 - rank][1]
    assert checkpoints.steps(tmp_path / "torn" / "out" / "checkpoints") == [1]
    assert run_ranks(2, resume_on_ranks, tmp_path / "torn") == expected
    assert names(tmp_path / "torn") == [f"step-{STEPS:08d}"]


def save_after_a_full_disk(folder: Path) -> tuple:
    from tests.tiny import tiny_model
    from zft.api import Engine, EngineConfig, World

    with Engine(tiny_model("llama"), EngineConfig(compute_device="cpu"), world=World.single("cpu")) as engine:
        before = digest(engine)
        with faulty(4, "full"), pytest.raises(OSError, match="No space left"):
            engine.save(folder / "step-00000001")
        left = sorted(path.name for path in folder.iterdir())
        engine.save(folder / "step-00000001")
        engine.load(folder / "step-00000001")
        return left, sorted(path.name for path in folder.iterdir()), digest(engine) == before


def test_the_same_process_saves_again_after_a_full_disk(tmp_path):
    assert run_ranks(1, save_after_a_full_disk, tmp_path) == [([], ["step-00000001"], True)]


def order_of_operations(folder: Path) -> list[tuple[str, str]]:
    small_gathers()
    with faulty(None) as disk:
        train(folder, steps=1)
    return disk.log


def test_all_is_durable_before_the_name(tmp_path):
    """What a power cut could take: every file is synced after its last write, its folder before the rename, the name after."""
    [log] = run_ranks(1, order_of_operations, tmp_path)
    work, final = ".tmp-step-00000001", "checkpoints/step-00000001"
    renamed = next(i for i, (name, what) in enumerate(log) if name == "rename" and what.endswith(final))
    for file in ("rank-00000-of-00001.safetensors", "manifest.json"):
        touched = [(i, name) for i, (name, what) in enumerate(log) if f"{work}/{file}" in what]
        last = {name: i for i, name in touched}
        assert last["write"] < last["sync"] < renamed, file
    folders = [i for i, (name, what) in enumerate(log) if name == "sync_folder" and what.endswith(work)]
    created = [i for i, (name, _) in enumerate(log) if name == "create"]
    assert max(created) < max(folders) < renamed
    assert log[renamed + 1][0] == "sync_folder" and log[renamed + 1][1].endswith("checkpoints")
    manifest = [i for i, (_, what) in enumerate(log) if "manifest.json" in what]
    assert all(i < min(manifest) for i, (_, what) in enumerate(log) if "safetensors" in what), "the manifest is last"


WRITING = {
    "open",
    "write_text",
    "write_bytes",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmtree",
    "rmdir",
    "fsync",
    "makedirs",
}
GUARDED = (
    "zft/checkpoint/manifest.py",
    "zft/checkpoint/shard.py",
    "zft/checkpoint/sharded.py",
    "zft/train/checkpoints.py",
)


def writes_past_the_disk(source: str) -> list[str]:
    """Calls that change a disk without zft.checkpoint.disk, where the tests above would not see them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if (
                name in WRITING
                and "DISK" not in ast.unparse(node.func)
                and '"rb"' not in ast.unparse(node).replace("'", '"')
            ):
                found.append(ast.unparse(node))
    return [call for call in found if not call.startswith("dataclasses.replace")]


def test_saves_write_through_the_disk_only():
    for name in GUARDED:
        assert not writes_past_the_disk((ROOT / name).read_text(encoding="utf-8")), name
    assert writes_past_the_disk("path.write_text('x')") and writes_past_the_disk("os.rename(a, b)")
