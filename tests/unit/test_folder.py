"""When a run folder may be made, and what overwrite may remove."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from zft.compose import compose
from zft.config import RunConfig, ZftError
from zft.dist import World
from zft.train.folder import RunFolder, check_nvme_dir
from zft.tree import read_tree


@pytest.fixture
def here(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    return tmp_path


def create(folder: RunFolder, run: RunConfig) -> None:
    with folder.opened(run, False, World.single("cpu")):
        pass


def config(here: Path, *args: str) -> RunConfig:
    return compose("sft", ["model=model", "data=a.jsonl", "out=out", *args], here)


def refusal(run: RunConfig) -> str:
    here = Path(run.data[0].path).parent
    before = snapshot(here)
    with pytest.raises(ZftError) as caught:
        RunFolder(run.out).check(run)
    assert snapshot(here) == before
    return str(caught.value)


def snapshot(folder: Path) -> dict:
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


def test_a_new_folder_is_made_with_its_config(here):
    run = config(here, "out=new/deep")
    folder = RunFolder(run.out)
    folder.check(run)
    assert not folder.path.exists(), "a check writes nothing"
    create(folder, run)
    assert read_tree(folder.config)["model"] == str(here / "model")
    assert [path.name for path in folder.path.iterdir()] == ["config.yaml"]


def test_a_folder_with_something_in_it_is_refused(here):
    (here / "out").mkdir()
    RunFolder(here / "out").check(config(here))
    (here / "out" / "thesis.tex").write_text("years")
    assert "out is not empty" in refusal(config(here)) and str(here / "out") in refusal(config(here))
    assert "removes only folders of zft runs" in refusal(config(here, "overwrite=true"))
    assert (here / "out" / "thesis.tex").read_text() == "years"


def test_overwrite_replaces_a_run(here):
    first = config(here)
    create(RunFolder(first.out), first)
    assert "zft resume" in refusal(first) and "overwrite=true" in refusal(first)
    (here / "out" / "old.txt").write_text("x")
    again = replace(first, overwrite=True)
    RunFolder(again.out).check(again)
    assert (here / "out" / "old.txt").exists(), "a check removes nothing"
    create(RunFolder(again.out), again)
    assert not (here / "out" / "old.txt").exists()


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_what_turns_out_wrong_leaves_nothing(here, is_overwrite):
    run = config(here, f"overwrite={str(is_overwrite).lower()}")
    if is_overwrite:
        create(RunFolder(run.out), run)
        (here / "out" / "metrics.jsonl").write_text("old\n")
    before = {path: content for path, (_, content) in snapshot(here).items()}
    with pytest.raises(ZftError), RunFolder(run.out).opened(run, False, World.single("cpu")):
        (here / "out" / "tiers").mkdir()
        raise ZftError("no room")
    assert {path: content for path, (_, content) in snapshot(here).items()} == before


def test_a_failure_while_loading_can_be_resumed(here):
    run = config(here)
    with pytest.raises(RuntimeError), RunFolder(run.out).opened(run, False, World.single("cpu")):
        raise RuntimeError("killed")
    assert RunFolder(run.out).is_run


def test_overwrite_does_not_remove_what_the_run_reads(here):
    first = config(here)
    create(RunFolder(first.out), first)
    (here / "out" / "export").mkdir()
    assert "would remove" in refusal(replace(config(here, "model=out/export"), overwrite=True))
    (here / "out" / "b.jsonl").write_text("{}\n")
    assert "would remove" in refusal(replace(config(here, "data=out/b.jsonl"), overwrite=True))


def test_only_an_error_log_is_as_good_as_empty(here):
    run = config(here)
    RunFolder(run.out).log_error(ValueError("boom"))
    assert "ValueError: boom" in (here / "out" / "error.log").read_text()
    RunFolder(run.out).check(run)
    create(RunFolder(run.out), run)
    assert not (here / "out" / "error.log").exists()


def test_out_is_a_file(here):
    (here / "out").write_text("x")
    assert "out is a file" in refusal(config(here))
    assert "is a file" in refusal(config(here, "out=a.jsonl/x"))


@pytest.mark.skipif(os.name == "nt", reason="/proc is Linux's")
def test_folders_that_cannot_be_written(here):
    if not Path("/proc/self").exists():
        pytest.skip("no /proc, the one folder that even root can't write to")
    assert "out is not writable, got /proc/zft" in refusal(config(here, "out=/proc/zft"))
    run = config(here, "engine=zero3_nvme", "engine.nvme_dir=/proc/zft")
    assert "engine.nvme_dir is not writable, got /proc/zft" in refusal(run)
    check_nvme_dir(config(here, "engine=zero3_cpu", "engine.nvme_dir=/proc/zft"))
    offload = config(
        here, "engine=zero0", "activation=offload", "engine.activation_tier=nvme", "engine.nvme_dir=/proc/zft"
    )
    with pytest.raises(ZftError, match="not writable"):
        check_nvme_dir(offload)
