"""Cases j: the command line and its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from tests.tiny import tiny_model, tiny_tokenizer
from tests.toy import WIDTH, Toy, square_loss, toy_batches
from zft.api import Engine
from zft.cli import main
from zft.compose import compose
from zft.config import AdamW, EngineConfig, RunConfig, ZftError
from zft.data import prepare
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


# 80


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("learning_rat=1e-4", "train.lr"),
        ("train.warmup_step=3", "train.warmup_steps"),
        ("engine.stat_tier=cpu", "engine.state_tier"),
        ("warmup_steps=3", "train.warmup_steps"),
        ("engine.seq_len=3", "train.seq_len"),
        ("optimizer.lr=3", "train.lr"),
        ("+train.stepz=3", "train.steps"),
        ("method=loar", "lora"),
        ("TRAIN.LR=3", "train.lr"),
        ("train.learning-rate=3", "train.lr"),
    ],
)
def test_80_a_mistyped_override_names_the_nearest_key(override, nearest, here):
    """A key that zft doesn't know is an error that names the nearest one, or the full name at the right level.

    Not reported: a mistyped option of a group, and a name that is right but for its case or its dash.
    """
    with pytest.raises(ZftError) as error:
        config(here, override)
    assert override.partition("=")[0] in str(error.value) and nearest in str(error.value)


def test_80_two_mistakes_are_reported_at_once(here):
    """Every unknown key is named in one message, and nothing is written."""
    with pytest.raises(ZftError) as error:
        config(here, "learning_rat=1", "train.stesp=2")
    assert all(name in str(error.value) for name in ("learning_rat", "train.lr", "train.stesp", "train.steps"))
    assert not (here / "out").exists()


# 81


def not_a_number(model: nn.Module, mb: dict) -> tuple[torch.Tensor, float]:
    return model(mb["input_ids"]).logits.sum() * torch.nan, 1.0


def curve(folder: str, accum: int, schedule: str, bad_step: int | None) -> list[tuple[float, bool]]:
    """(lr, skipped) of every step of a real run of 10 updates, from rank 0's log."""
    here = Path(folder)
    world = World.from_env("cpu")
    run = config(here, f"train.steps={10 + (bad_step is not None)}", "train.lr=0.01", f"train.schedule={schedule}",
                 f"out={schedule}-{accum}-{world.size}-{bad_step}", f"train.grad_accum_steps={accum}", "precision=fp32",
                 "engine.compute_device=cpu", "engine=zero3")  # fmt: skip
    prepared = prepare(str(here / "rows.jsonl"), tiny_tokenizer(64), seq_len=32)
    out = RunFolder(run.out)
    with out.opened(run, False, world):
        pass
    with Engine(tiny_model("llama", num_hidden_layers=1), run.engine, world=world) as engine:
        loader = prepared.loader(world.rank, world.size, 1, accum, None)
        job = Job(run, engine, loader, world, out)
        if bad_step is not None:
            step, done = engine.step, iter(range(100))

            def spoiled(micro_batches, lr):
                return step(micro_batches, lr=lr, loss_fn=not_a_number if next(done) == bad_step else None)

            engine.step = spoiled
        fit(job, run.train.steps)
        assert lr_at(10, schedule, 0.01, 0, 10) == pytest.approx(0, abs=1e-12)
    return [(row["lr"], row["skipped"]) for row in read(out.metrics)]


def rows_file(here: Path) -> None:
    row = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
    (here / "rows.jsonl").write_text((json.dumps(row) + "\n") * 7)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("accum", [1, 4])
def test_81_the_schedule_steps_once_an_update(size, accum, here):
    """Linear decay over 10 updates is the same curve for any accumulation and number of ranks, and 0 after the last."""
    rows_file(here)
    found = run_ranks(size, curve, str(here), accum, "linear", None)
    assert all(rows == found[0] for rows in found)
    assert [lr for lr, _ in found[0]] == pytest.approx([0.01 * (1 - step / 10) for step in range(10)])


def test_81_other_schedules_and_skipped_steps(here):
    """Other schedules keep to updates, too, and a skipped step takes nothing of the schedule.

    Not reported: a cosine with 4 micro-batches, and a step whose gradient is not finite.
    """
    rows_file(here)
    cosine = run_ranks(2, curve, str(here), 4, "cosine", None)[0]
    assert [lr for lr, _ in cosine] == pytest.approx([lr_at(step, "cosine", 0.01, 0, 10) for step in range(10)])
    skipping = run_ranks(2, curve, str(here), 2, "linear", 4)[0]
    assert [skipped for _, skipped in skipping] == [step == 4 for step in range(11)]
    updates = [step - (step > 4) for step in range(11)]
    assert [lr for lr, _ in skipping] == pytest.approx([lr_at(update, "linear", 0.01, 0, 11) for update in updates])


# 84


class MyRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, WIDTH))  # two dimensions, so that only its class tells

    def forward(self, x):
        return x * self.weight


class Gain(nn.Module):
    """Its class says nothing, its name in the model does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.bias = nn.Parameter(torch.full((1, WIDTH), 0.1))

    def forward(self, x):
        return x * self.scale + self.bias


def decayed(model: nn.Module, step) -> dict[str, float]:
    """{parameter: share of its value that one update took}: lr x decay is all that moves a weight here."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optim = AdamW(lr=1e-3, weight_decay=0.5, eps=1e6)  # the step itself is nothing next to the decay
    with Engine(model, EngineConfig(precision="fp32", compute_device="cpu", optim=optim)) as engine:
        step(engine)
        after = list(engine.named_parameters())
        spans = [span.name for group in engine.parts.records for span in group.layout.spans]
    assert sorted(spans) == sorted(before) == sorted(name for name, _ in after), "each parameter is in one group"
    return {name: ((before[name] - value).norm() / before[name].norm()).item() for name, value in after}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt", "phi3", "qwen3"])
def test_84_norms_and_biases_are_not_decayed(family):
    """Weight decay is for matrices: norms, by class or name, and biases keep their value; a parameter has one group."""
    ids = torch.arange(2, 18).reshape(1, 16)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    for name, share in decayed(tiny_model(family), lambda engine: engine.step([batch])).items():
        matrix = name.endswith("weight") and "norm" not in name and "ln_" not in name
        assert share == pytest.approx(5e-4 if matrix else 0, abs=2e-6), name


class OddLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.mine, self.post_attention_layernorm, self.gate = MyRMSNorm(), Gain(), Gain()
        self.A_log = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x + self.gate(self.post_attention_layernorm(self.mine(self.inner(x)))) * self.A_log


class OddModel(Toy):
    _no_split_modules = ("OddLayer",)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(OddLayer() for _ in range(2))


def test_84_norms_of_a_models_own():
    """A model's own norms are told by class or by name; vectors are never decayed, matrices are whatever their name.

    Not reported: a norm whose weight has two dimensions, and one that only its name tells.
    """
    shares = decayed(OddModel(), lambda engine: engine.step(toy_batches(2)[0], loss_fn=square_loss))
    for name, share in shares.items():
        kept = any(part in name for part in ("mine", "layernorm", "A_log", "bias"))
        assert share == pytest.approx(0 if kept else 5e-4, abs=2e-6), name
    assert shares["layers.0.gate.scale"] > 0, "a matrix by any other name"


# 85


@pytest.mark.parametrize("kind", ["notes", "hidden", "run", "link", "file"])
def test_85_a_folder_with_something_in_it_is_refused(kind, here):
    """A folder that isn't empty is refused and left as it is, unless the user says resume or overwrite.

    Not reported: a folder with nothing but a hidden file, and a link to a full folder.
    """
    out = here / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        inside = here / "elsewhere" if kind == "link" else out
        inside.mkdir()
        (inside / {"hidden": ".notes", "run": "config.yaml"}.get(kind, "notes.txt")).write_text("mine")
        if kind == "link":
            out.symlink_to(inside)
    before = {path: path.read_text() for path in here.rglob("*") if path.is_file()}
    run = config(here)
    said = "out is a file" if kind == "file" else "not empty.*choose another folder.* or overwrite=true"
    with pytest.raises(ZftError, match=said) as error:
        RunFolder(run.out).check(run)
    assert ("`zft resume" in str(error.value)) == (kind == "run")
    if kind != "run":
        with pytest.raises(ZftError, match="removes only folders of zft runs|out is a file"):
            RunFolder(run.out).check(config(here, "overwrite=true"))
    assert {path: path.read_text() for path in here.rglob("*") if path.is_file()} == before


def test_85_new_resume_and_overwrite(here, monkeypatch):
    """A new folder is made, `overwrite=true` replaces a run but nothing that the new one reads, resume needs a run."""
    run = config(here)
    RunFolder(run.out).check(run)
    with RunFolder(run.out).opened(run, False, World.single("cpu")):
        (here / "out" / "metrics.jsonl").write_text("old\n")
    again = config(here, "overwrite=true")
    RunFolder(run.out).check(again)
    with RunFolder(run.out).opened(again, False, World.single("cpu")):
        assert not (here / "out" / "metrics.jsonl").exists()
    (here / "out" / "b.jsonl").write_text("{}\n")
    reads = compose("sft", ["model=model", "data=out/b.jsonl", "out=out", "overwrite=true"], here)
    with pytest.raises(ZftError, match="would remove .*b.jsonl, which this run reads"):
        RunFolder(run.out).check(reads)
    (here / "empty").mkdir()
    monkeypatch.chdir(here)
    assert main(["resume", "empty"]) == 2 and main(["resume", "absent"]) == 2
    assert not (here / "absent").exists() and not list((here / "empty").iterdir())
