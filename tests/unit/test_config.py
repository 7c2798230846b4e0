"""The command line's keys: groups, defaults, names on disk, and what is said about wrong ones."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml

from zft import config
from zft.compose import compose, configs_folder, options, recipes, recompose
from zft.config import DataSource, EngineConfig, Nonfinite, RunConfig, Tier, ZftError
from zft.overrides import suggest
from zft.schema import ENGINE_ALIASES, GROUPS, keys
from zft.tree import build, read_tree, to_tree, to_yaml


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    return tmp_path


def run(here: Path, *args: str, recipe: str = "sft") -> RunConfig:
    return compose(recipe, ["model=model", "data=a.jsonl", *args], here)


def error(here: Path, *args: str) -> str:
    with pytest.raises(ZftError) as caught:
        run(here, *args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_dataclasses(here):
    made = run(here)
    assert made.train == config.TrainConfig(lr=1e-5)
    assert made.engine == EngineConfig(nvme_dir=str(Path(made.out) / "tiers"))
    assert made.auto_tiers == ("param_tier", "state_tier", "grad_tier")
    assert (made.model, made.data) == (str(here / "model"), (DataSource(str(here / "a.jsonl")),))
    assert Path(made.out).parent == here / "runs" and Path(made.out).name.startswith("sft-model-")
    with pytest.raises(FrozenInstanceError):
        made.nproc = 2


@pytest.mark.parametrize(
    ("option", "stage", "tiers"),
    [("zero0", 0, "device"), ("zero1", 1, "device"), ("zero2", 2, "device"), ("zero3", 3, "device"),
     ("zero3_cpu", 3, "cpu"), ("zero3_nvme", 3, "nvme")],
)  # fmt: skip
def test_engine_groups(here, option, stage, tiers):
    engine = run(here, f"engine={option}").engine
    assert (engine.stage, engine.param_tier, engine.state_tier, engine.grad_tier) == (stage, *[Tier(tiers)] * 3)


def test_a_key_beats_its_group_in_either_order(here):
    for args in (["engine.grad_tier=cpu", "engine=zero3_nvme"], ["engine=zero3_nvme", "engine.grad_tier=cpu"]):
        engine = run(here, *args).engine
        assert (engine.param_tier, engine.grad_tier) == (Tier.nvme, Tier.cpu)
    assert run(here, "engine.param_tier=nvme").auto_tiers == ("state_tier", "grad_tier")


@pytest.mark.parametrize(
    ("args", "optim"),
    [
        (["optimizer=adamw", "train.lr=3e-4", "train.weight_decay=0.1"], config.AdamW(lr=3e-4, weight_decay=0.1)),
        (["optimizer=adamw_compact", "optimizer.betas=[0.8,0.9]"], config.AdamW(betas=(0.8, 0.9), compact=True)),
        (["optimizer.eps=1e-3"], config.AdamW(eps=1e-3)),
        (["optimizer=sgd", "optimizer.momentum=0"], config.SGD(momentum=0.0)),
        (["optimizer=lion"], config.Lion()),
    ],
)
def test_optimizers(here, args, optim):
    made = run(here, *args)
    assert made.engine.optim == optim
    assert made.train.lr == optim.lr, "the resolved file shows the learning rate that is used"


def test_engine_fields_that_live_elsewhere_are_accepted_under_both_names(here):
    made = run(here, "engine.precision=fp32", "engine.max_grad_norm=null", "engine.seed=7", "engine.nonfinite=raise")
    assert (made.engine.precision, made.engine.max_grad_norm, made.engine.seed) == ("fp32", None, 7)
    assert (made.train.max_grad_norm, made.train.seed) == (None, 7)
    assert made.engine.nonfinite is Nonfinite.raise_
    fields = {f"engine.{name}" for name in EngineConfig.__dataclass_fields__} - {"engine.optim"}
    assert fields == {name for name in keys() if name.startswith("engine.")} | set(ENGINE_ALIASES)


@pytest.mark.parametrize(
    "name",
    ["with space.jsonl", "a=b.jsonl", "#1.jsonl", "~x.jsonl", "größe-数据.jsonl", "a,b.jsonl", "${x}.jsonl", "[1].jsonl",
     "it's.jsonl", "{a: b}.jsonl", "a'b\"c.jsonl", "x\\y.jsonl", "null.jsonl", "(1).jsonl", "+a.jsonl"],
)  # fmt: skip
def test_names_on_disk_are_taken_literally(here, name):
    (here / name).write_text("{}\n")
    assert run(here, f"data={name}").data == (DataSource(str(here / name)),)
    folder = here / name.removesuffix(".jsonl")
    folder.mkdir()
    made = run(here, f"model={folder.name}", f"out=out {name}", f"engine.nvme_dir=tiers {name}")
    assert (made.model, made.out) == (str(folder), str(here / f"out {name}"))
    assert made.engine.nvme_dir == str(here / f"tiers {name}")
    assert build(yaml.safe_load(to_yaml(made)), here) == made


def test_data_lists(here):
    (here / "b c.jsonl").write_text("{}\n")
    (here / "d,e.jsonl").write_text("{}\n")
    a, b, d = (str(here / name) for name in ("a.jsonl", "b c.jsonl", "d,e.jsonl"))
    assert run(here, "data=[a.jsonl,b c.jsonl]").data == (DataSource(a), DataSource(b))
    assert run(here, "data=[a.jsonl, 'd,e.jsonl']").data == (DataSource(a), DataSource(d))
    made = run(here, "data=[{path: a.jsonl, weight: 0.5}, {weight: 2, path: 'd,e.jsonl'}]")
    assert made.data == (DataSource(a, 0.5), DataSource(d, 2.0))
    assert run(here, "eval_data=b c.jsonl").eval_data == (DataSource(b),)
    assert run(here, "data=[org/name,a.jsonl]").data == (DataSource("org/name"), DataSource(a))
    assert "'gone.jsonl'" in error(here, "data=[a.jsonl,gone.jsonl]")
    assert "weight: NUMBER > 0" in error(here, "data=[{path: a.jsonl, weight: -1}]")
    assert "pathh" in error(here, "data=[{pathh: a.jsonl}]")


def test_other_values(here):
    made = run(here, "method.targets=q_proj", "data_options.columns.prompt=question", "data_options.split=train[:10]")
    assert made.method.targets == ("q_proj",)
    assert made.data_options.columns == {"prompt": "question"} and made.data_options.split == "train[:10]"
    assert run(here, "data_options.columns={prompt: q, completion: a}").data_options.columns == {
        "prompt": "q",
        "completion": "a",
    }
    assert run(here, "method.targets=[q_proj,v_proj]").method.targets == ("q_proj", "v_proj")
    assert run(here, "engine.compute_device=cuda:0").engine.compute_device == "cuda:0"


@pytest.mark.parametrize(
    ("arg", "said"),
    [
        ("train.lr=abc", "train.lr must be a number >= 0 or null, got abc"),
        ("train.steps=1.5", "got 1.5"),
        ("train.steps=0", "train.steps must be an integer >= 1"),
        ("train.steps=true", "got true"),
        ("train.max_grad_norm=0", "> 0"),
        ("train.lr=nan", "got nan"),
        ("train.lr=inf", "got inf"),
        ("train.lr=", "train.lr"),
        ("train.lr=1,2", "got 1,2"),
        ("train.schedule=cosin", "constant, linear, cosine or wsd, got cosin"),
        ("precision=fp8", "auto, bf16, fp16 or fp32, got fp8"),
        ("engine.stage=4", "<= 3, got 4"),
        ("engine.param_tier=disk", "device, cpu or nvme, got disk"),
        ("optimizer.betas=[0.9]", "two numbers"),
        ("optimizer.betas=[0.9,1.5]", "got [0.9,1.5]"),
        ("optimizer.momentum=0.5", "no meaning for optimizer=adamw"),
        ("overwrite=1", "true or false, got 1"),
        ("nproc=0", "nproc must be an integer >= 1"),
        ("train.seq_len=(", "train.seq_len"),
        ("train.eval_every=5", "needs eval_data"),
        ("engine=fsdp", "engine has no option 'fsdp'"),
        ("engine=zero3_nvm", "zero3_nvme"),
        ("method=dpo", "method has no option 'dpo'"),
        ("model=gone/", "'gone/'"),
        ("model=", "model is empty"),
        ("data=gone.jsonl", "'gone.jsonl'"),
        ("data_options.chat_template=gone.jinja", "'gone.jinja'"),
        ("track=mlflow", "trackio or wandb, got mlflow"),
        ("steps", "expected key=value, got 'steps'"),
    ],
)
def test_wrong_values_are_named(here, arg, said):
    assert said in error(here, arg)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("learning_rate", "train.lr"), ("train.learning_rate", "train.lr"), ("max_length", "train.seq_len"),
        ("output_dir", "out"), ("num_train_epochs", "train.epochs"), ("batch_size", "train.micro_batch_size"),
        ("per_device_train_batch_size", "train.micro_batch_size"), ("dataset", "data"), ("lora_rank", "method.r"),
        ("gradient_accumulation_steps", "train.grad_accum_steps"), ("model_name_or_path", "model"),
        ("lr", "train.lr"), ("seq_len", "train.seq_len"), ("betas", "optimizer.betas"), ("engine.lr", "train.lr"),
        ("pack", "data_options.pack"), ("stage", "engine.stage"), ("data.pack", "data_options.pack"),
        ("learning_rat", "train.lr"), ("train.step", "train.steps"), ("engine.parm_tier", "engine.param_tier"),
        ("modle", "model"), ("optimzer", "optimizer"), ("train.grad_acum_steps", "train.grad_accum_steps"),
        ("+train.steps", "train.steps"), ("--train.steps", "train.steps"),
    ],
)  # fmt: skip
def test_unknown_keys_name_the_right_one(here, key, name):
    assert error(here, f"{key}=1").endswith((f" {name}", f" {name}?", f" {name}=VALUE"))


def test_foreign_names_lead_to_keys_that_exist():
    from zft.overrides import FOREIGN

    assert not [name for name in FOREIGN.values() if name not in keys() and name not in GROUPS]
    assert not [name for name in FOREIGN if name in keys()]
    assert "lists the keys" in suggest("qqqqqq")


def test_every_problem_is_reported_at_once(here):
    said = error(here, "train.lr=abc", "learning_rat=1", "train.steps=0", "model=gone/", "engine=fsdp")
    for part in ("train.lr", "learning_rat", "train.steps", "gone/", "fsdp"):
        assert part in said


def test_missing_keys(here):
    with pytest.raises(ZftError, match="model is missing.*data is missing"):
        compose("sft", [], here)
    with pytest.raises(ZftError, match="no recipe 'dpo'; choose pretrain, sft"):
        compose("dpo", [], here)


def test_the_tree_is_the_inverse_of_build(here):
    made = run(
        here,
        "engine=zero3_nvme",
        "optimizer=adamw_compact",
        "train.steps=3",
        "method.targets=[a,b]",
        "eval_data=a.jsonl",
    )
    assert build(yaml.safe_load(to_yaml(made)), here) == made
    auto = run(here)
    assert build(to_tree(auto), here) == auto
    assert set(flat(to_tree(made))) - {f"{group}.name" for group in GROUPS} - {"recipe"} == set(keys())


def flat(tree: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and f"{prefix}{key}" != "data_options.columns"
        found |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


def test_nvme_dir_follows_a_moved_run(here):
    made = run(here, "out=old", "engine=zero3_nvme")
    assert made.engine.nvme_dir == str(here / "old" / "tiers")
    moved = recompose(to_tree(made) | {"out": str(here / "new")}, [], here)
    assert moved.engine.nvme_dir == str(here / "new" / "tiers")


def test_resume_changes_what_may_change(here):
    tree = to_tree(run(here, "engine=zero3_nvme", "train.stop_after=2", "train.steps=9"))
    made = recompose(tree, [], here)
    assert made.train.stop_after is None and made.train.steps == 9
    made = recompose(tree, ["engine=zero3_cpu", "train.steps=12", "train.save_every=2"], here)
    assert made.engine.state_tier == Tier.cpu and made.train.steps == 12 and made.train.save_every == 2
    for arg in ("model=model", "data=a.jsonl", "out=x", "optimizer.eps=1e-3"):
        with pytest.raises(ZftError, match="can't change on resume"):
            recompose(tree, [arg], here)


def test_read_tree_fills_keys_that_an_older_run_lacks(here):
    tree = to_tree(run(here))
    del tree["train"]["keep"], tree["track"]
    (here / "config.yaml").write_text(yaml.safe_dump(tree))
    assert build(read_tree(here / "config.yaml"), here).train.keep == config.TrainConfig().keep
    with pytest.raises(ZftError, match="not a run folder"):
        read_tree(here / "model" / "config.yaml")


@pytest.mark.parametrize("recipe", recipes())
@pytest.mark.parametrize(("group", "option"), [(g, o) for g in GROUPS if g != "experiment" for o in options(g)])
def test_every_option_composes(here, recipe, group, option):
    assert run(here, f"{group}={option}", recipe=recipe)


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes(here, experiment):
    made = compose("sft", [f"experiment={experiment}", "data=a.jsonl"], here)
    assert "/" in made.model
    assert compose("sft", [f"experiment={experiment}", "data=a.jsonl", "train.lr=0.5"], here).train.lr == 0.5


def test_presets_obey_the_same_rules(here, monkeypatch):
    import shutil

    copied = here / "configs"
    shutil.copytree(configs_folder(), copied)
    (copied / "experiment" / "bad.yaml").write_text("# @package _global_\ntrain:\n  lr: fast\n  learning_rate: 1\n")
    monkeypatch.setattr("zft.compose.configs_folder", lambda: copied)
    with pytest.raises(ZftError, match=r"unknown key 'train\.learning_rate'.*train\.lr must be a number"):
        run(here, "experiment=bad")


def test_every_key_is_documented():
    assert [key.name for key in keys().values() if not key.doc] == []


def test_a_recipe_of_ones_own(here):
    (here / "mine.py").write_text('CONFIG = "pretrain"\n')
    assert run(here, recipe="./mine.py").recipe == str(here / "mine.py")
    assert Path(run(here, recipe="./mine.py").out).name.startswith("mine-model-")
    with pytest.raises(ZftError, match="no recipe './gone.py'"):
        run(here, recipe="./gone.py")


def test_data_options_are_one_class():
    from zft.data import options as data_options

    assert data_options.DataOptions is config.DataOptions
