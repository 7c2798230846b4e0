"""Cases e: checkpoints, resuming, exports: what people lose when a save fails or a run ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.cases.rows import chat, write
from tests.cases.shares import row
from tests.faults import faulty
from tests.fixtures.data.tokenizers import bpe_tokenizer
from tests.harness import run_ranks, run_ranks_to_end
from tests.integration.test_resume_elsewhere import load_and_save, stored, train_and_save
from tests.small_run import names, train
from tests.tiny import tiny_folder
from zft.api import Engine
from zft.checkpoint.hf import ExportError, verify_export
from zft.config import AdamW, EngineConfig, ZftError
from zft.data import prepare
from zft.dist import World
from zft.models.load import HubWeights, build_model
from zft.train import checkpoints

CONFIG = EngineConfig(compute_device="cpu", timeout_s=60.0, optim=AdamW(lr=0.02))


def seeded_row() -> list[dict[str, torch.Tensor]]:
    return [row(9, seed=int(os.environ.get("RANK", 0)))]


def on_disk(folder: Path) -> list[int]:
    return checkpoints.steps(folder / "out" / "checkpoints")


# 33: a save that fails half-way


def run(folder: Path, *overrides: str) -> dict:
    return train(folder, *overrides)


def resumed(folder: Path, steps: int = 3) -> dict:
    return train(folder, steps=steps, resume=True)


def fails_in_the_last_shard(folder: Path, kind: str) -> None:
    """The last rank's save of step 2 fails in the middle of its shard: operation 6 of the rank's log."""
    world = World.from_env("cpu")
    with faulty(6 if world.rank == world.size - 1 else None, kind):
        train(folder)


@pytest.mark.parametrize(("size", "kind"), [(2, "full"), (2, "kill"), (3, "full")])
def test_33_save_that_fails_is_never_the_latest(tmp_path, size, kind):
    """A save that fails in one rank's shard raises on all ranks, and the checkpoint before stays the latest.

    Resume goes on from it and saves the same step again.
    """
    whole = run_ranks(size, run, tmp_path / "whole")
    outcomes = run_ranks_to_end(size, fails_in_the_last_shard, tmp_path / "torn", kind, timeout_s=100)
    ended = ["error"] * size if kind == "full" else ["error"] * (size - 1) + ["died"]
    assert [outcome for outcome, _ in outcomes] == ended, "all ranks raise, nobody hangs"
    assert on_disk(tmp_path / "torn") == [1]
    assert run_ranks(size, resumed, tmp_path / "torn") == whole, "resumed from step 1; step 2 is saved again"


@pytest.mark.parametrize("damage", ["truncated", "flipped byte", "no manifest", "no shard", "torn manifest"])
def test_33_damaged_checkpoint_is_never_chosen(tmp_path, damage):
    """A newest checkpoint that is truncated, changed or incomplete is passed over for the one before it."""
    [whole] = run_ranks(1, run, tmp_path / "whole", "train.keep=3")
    run_ranks(1, run, tmp_path / "torn", "train.keep=3")
    newest = checkpoints.step_folder(tmp_path / "torn" / "out" / "checkpoints", 3)
    [shard] = newest.glob("*.safetensors")
    manifest, content = newest / "manifest.json", shard.read_bytes()
    if damage == "truncated":
        shard.write_bytes(content[: len(content) // 2])
    elif damage == "flipped byte":
        shard.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "torn manifest":
        manifest.write_text(manifest.read_text()[:-20])
    else:
        (manifest if damage == "no manifest" else shard).unlink()
    assert on_disk(tmp_path / "torn") == ([1, 2, 3] if damage == "flipped byte" else [1, 2])
    [found] = run_ranks(1, resumed, tmp_path / "torn")
    assert (found["losses"], found["weights"]) == (whole["losses"], whole["weights"])


# 34: who renames


def renames(folder: Path) -> list[str]:
    with faulty(None) as disk:
        train(folder)
    return [what for name, what in disk.log if name == "rename"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_34_one_rank_renames(tmp_path, size):
    """Only rank 0 renames the staging folder, after all ranks have written; nothing is staged afterwards."""
    first, *others = run_ranks(size, renames, tmp_path)
    assert len(first) >= 3 and others == [[]] * (size - 1)
    assert names(tmp_path) == ["step-00000003"]


# 36, 37: random state and data position


def seven(folder: Path) -> dict:
    return train(folder, steps=7)


def stopped(folder: Path, stop: int) -> dict:
    return train(folder, f"train.stop_after={stop}", steps=7)


@pytest.mark.parametrize(
    ("size", "stop"), [(1, 1), (1, 5), (1, 4), (2, 1), (2, 5), pytest.param(3, 4, marks=pytest.mark.slow)]
)
def test_36_order_and_dropout_after_a_resume(tmp_path, size, stop):
    """Order and dropout of a resumed run are those of the uninterrupted one, to the last bit.

    5 rows, 2 a step: step 5 ends the second epoch, the others end in the middle of one.
    """
    whole = run_ranks(size, seven, tmp_path / "whole")
    run_ranks(size, stopped, tmp_path / "parts", stop)
    assert run_ranks(size, resumed, tmp_path / "parts", 7) == whole


@pytest.mark.parametrize("stop", [0, 2, 4, 5, 8], ids=lambda stop: f"after {stop} steps")
@pytest.mark.parametrize(
    ("ranks", "later", "options"), [(1, 1, {}), (2, 1, {}), (1, 3, {}), (2, 2, {"pack": True})], ids=str
)
def test_37_every_row_once_an_epoch(tmp_path, stop, ranks, later, options):
    """What was consumed before and after a resume is each row once an epoch, wherever it stopped and on however many ranks."""
    from zft.data import DataOptions

    answers = [chat(answer="of " * (1 + n)) for n in range(12)]
    prepared = prepare(
        write(tmp_path / "a.jsonl", answers), bpe_tokenizer("chatml"), DataOptions(**options), seq_len=64
    )
    epoch, micro = len(prepared.epochs.items), 12 // 4 // ranks or 1
    before = [prepared.loader(rank, ranks, micro, 1, 2) for rank in range(ranks)]
    seen = [loader.next_items().tolist() for _ in range(min(stop, before[0].total_steps)) for loader in before[:1]]
    state = json.loads(json.dumps(before[0].state_dict()))
    after = prepared.loader(0, later, 1, 2, 2)
    after.load_state_dict(state)
    while (items := after.next_items()) is not None:
        seen.append(items.tolist())
    consumed = [item for step in seen for item in step]
    assert len(consumed) == 2 * epoch
    assert sorted(consumed[:epoch]) == sorted(consumed[epoch:]) == list(range(epoch))


@pytest.mark.parametrize(("ranks", "later"), [(1, 1), (2, 3)])
def test_37_streamed_position_is_found_without_walking(tmp_path, ranks, later, monkeypatch):
    """Resuming reads no row before its position, and refuses a position in other data."""
    prepared = prepare(write(tmp_path / "a.jsonl", [chat(answer="of " * n) for n in range(1, 13)]), bpe_tokenizer("chatml"),
                       seq_len=64)  # fmt: skip
    loader = prepared.loader(0, ranks, 1, 2, 2)
    loader.next_step()
    state, again, read = loader.state_dict(), prepared.loader(0, later, 1, 1, 2), []
    store = type(prepared.epochs.store)
    ids = store.ids
    monkeypatch.setattr(store, "ids", lambda self, number: read.append(number) or ids(self, number))
    again.load_state_dict(state)
    assert read == []
    assert len(again.next_step()) == len(read) == 1
    other = prepare(write(tmp_path / "b.jsonl", [chat()] * 12), bpe_tokenizer("chatml"), seq_len=64)
    with pytest.raises(ZftError, match="changed since the checkpoint"):
        other.loader(0, 1, 1, 1, 2).load_state_dict(state)


# 38: another world size


@pytest.mark.parametrize(
    ("size", "later", "settings"),
    [(2, 1, {}), (2, 3, {}), (1, 2, {}), (3, 2, {"precision": "fp16"}), (2, 3, {"precision": "fp32", "stage": 1})],
    ids=str,
)
def test_38_another_world_size_has_the_same_state(tmp_path, size, later, settings):
    """Saved at one world size, loaded at another: weights and Adam moments bitwise the same, padding apart."""
    saved = run_ranks(size, train_and_save, tmp_path, "a", settings)
    loaded = run_ranks(later, load_and_save, tmp_path, "a", settings)
    first, second = stored(tmp_path / "a"), stored(tmp_path / "a-again")
    assert first.keys() == second.keys() and {"hi", "m", "v"} <= {field for _, field in first}
    assert all(torch.equal(entries, second[key]) for key, entries in first.items())
    for fqn, master in saved[0][0].items():
        assert all(master.tobytes() == other[0][fqn].tobytes() for other in loaded), fqn


def fp32(folder: Path, steps: int, resume: bool) -> dict:
    return train(folder, "precision=fp32", steps=steps, resume=resume)


@pytest.mark.parametrize("ranks", [1, 3])
def test_38_another_world_size_goes_on(tmp_path, ranks):
    """Two steps on 2 ranks and the third on others give, to float32 rounding, what 2 ranks do."""
    [whole, _] = run_ranks(2, fp32, tmp_path / "whole", 3, False)
    run_ranks(2, fp32, tmp_path / "parts", 2, False)
    found = run_ranks(ranks, fp32, tmp_path / "parts", 3, True)
    assert found[0]["losses"][:2] == whole["losses"][:2]
    assert found[0]["losses"][2][1] == pytest.approx(whole["losses"][2][1], abs=1e-6)


# 40: generation config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"do_sample": False, "temperature": 0.9}, "temperature=0.9"),
        ({"do_sample": False, "top_p": 0.5, "top_k": 3}, "top_p=0.5"),
        ({"temperature": 0.7}, "temperature=0.7"),
        ({"num_beams": 1, "num_return_sequences": 3}, "num_return_sequences=3"),
    ],
    ids=str,
)
def test_40_refused_generation_config_is_repaired(tmp_path, settings, named):
    """A generation config that transformers refuses to save is repaired with a warning and costs no weights.

    A save in the middle of the run does not look at it.
    """
    base = tiny_folder("llama", tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 2}))
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.step(seeded_row())
        engine.save(tmp_path / "checkpoint")
        report = engine.export(tmp_path / "out")
    assert named in report.warnings[0]
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    found.save_pretrained(tmp_path / "again")
    assert found.eos_token_id == 2
    assert verify_export(tmp_path / "out", base) == 21, "the weights are there all the same"


# 41, 42, 44, 46: exports


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, None])
@pytest.mark.parametrize(
    ("arch", "stored_as"), [("llama", torch.bfloat16), ("gpt_oss", torch.float32), ("gemma3", torch.float16)]
)
def test_41_header_request_and_config_agree(dtype, arch, stored_as, tmp_path):
    """The dtype asked for (or the base's) is that of every tensor and of config.json.

    Also where the base's config disagreed with itself.
    """
    base = tiny_folder(arch, tmp_path / "base", dtype=stored_as)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "sub_config": {"torch_dtype": "float64"}}))
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.export(tmp_path / "out", dtype=dtype)
    wanted = dtype or stored_as
    tensors = load_file(tmp_path / "out/model.safetensors")
    kept = {
        name
        for name, t in AutoModelForCausalLM.from_pretrained(base, dtype=wanted).state_dict().items()
        if t.dtype != wanted
    }
    assert bool(kept) == (arch == "gpt_oss" and wanted is torch.float16), (
        "what transformers itself insists on in float32"
    )
    assert {t.dtype for name, t in tensors.items() if name not in kept} == {wanted}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == wanted
    config = json.loads((tmp_path / "out/config.json").read_text())
    said = [config.get("dtype"), config.get("torch_dtype"), config["sub_config"]["torch_dtype"]]
    assert {each for each in said if each is not None} == {str(wanted).removeprefix("torch.")}


def with_frozen(base: str, folder: str, frozen: str) -> None:
    """On each rank: what is called `frozen` is frozen; a step, an export, a checkpoint, and the export of a resumed engine."""

    def engine() -> Engine:
        model = build_model(base)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return Engine(model, CONFIG, source=HubWeights(Path(base), model))

    with engine() as first:
        first.step(seeded_row())
        first.export(f"{folder}/out")
        first.save(f"{folder}/checkpoint")
    with engine() as second:
        second.load(f"{folder}/checkpoint")
        second.export(f"{folder}/resumed")


@pytest.mark.parametrize(
    ("size", "frozen", "count"),
    [(1, ".layers.0.", 9), (2, ".layers.0.", 9), (3, ".layers.0.", 9), (2, "embed_tokens", 1), (2, "norm", 5)],
)
def test_42_frozen_weights_are_saved(size, frozen, count, tmp_path):
    """Frozen weights are in the export bitwise as in the base, after a resume too, though a checkpoint need not hold them."""
    base = tiny_folder("llama", tmp_path / "base")
    run_ranks(size, with_frozen, str(base), str(tmp_path), frozen)
    old, new, again = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out", "resumed"))
    kept = {name for name in old if frozen in name}
    assert len(kept) == count and all(torch.equal(old[name], new[name]) for name in kept)
    assert any(not torch.equal(old[name], new[name]) for name in old.keys() - kept)
    assert all(torch.equal(again[name], tensor) for name, tensor in new.items())


def exports(base: str, folder: str, settings: dict) -> int | None:
    config = EngineConfig(**{**vars(CONFIG), **settings, "nvme_dir": f"{folder}/tiers"})
    with Engine.from_pretrained(base, config) as engine:
        engine.step(seeded_row())
        report = engine.export(f"{folder}/out")
        return report.total_bytes if report is not None else None


@pytest.mark.parametrize(
    ("size", "arch", "settings"),
    [
        (1, "llama", {}),
        (2, "llama", {}),
        (3, "llama", {}),
        (2, "llama_tied", {"stage": 0}),
        (2, "qwen3_moe", {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"}),
    ],
    ids=str,
)
def test_44_export_has_all_bytes(size, arch, settings, tmp_path):
    """The final export has numel x itemsize bytes and a header, and loads with 0 missing keys, at every world size."""
    base = tiny_folder(arch, tmp_path / "base")
    total, *others = run_ranks(size, exports, str(base), str(tmp_path), settings)
    assert others == [None] * (size - 1)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert total == sum(p.numel() for p in model.parameters()) * 2
    with open(tmp_path / "out/model.safetensors", "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert (tmp_path / "out/model.safetensors").stat().st_size == total + header


def stops_short(base: str, folder: str) -> None:
    with Engine.from_pretrained(base, CONFIG) as engine:
        units = engine.stream_units
        engine.stream_units = lambda dtype: list(units(dtype))[:-2]
        engine.export(f"{folder}/out")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_44_partial_export_is_an_error(size, tmp_path):
    """An export that lacks a weight raises on every rank and leaves no folder behind that looks like a model."""
    base = tiny_folder("llama", tmp_path / "base")
    outcomes = run_ranks_to_end(size, stops_short, str(base), str(tmp_path), timeout_s=60)
    assert [kind for kind, _ in outcomes] == ["error"] * size and "never given" in outcomes[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


@pytest.mark.parametrize(("arch", "shard"), [("llama", "20KB"), ("llama_tied", "8KB"), ("qwen3_moe", "30KB")])
def test_46_index_files_and_totals_agree(arch, shard, tmp_path):
    """The index is the export's own: its files, each tensor once, total_size = numel x itemsize.

    A base's own index is not copied.
    """
    base = tiny_folder(arch, tmp_path / "base", max_shard_size="12KB")
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.export(tmp_path / "out", max_shard_size=shard)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {each.name: load_file(each) for each in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files.keys()
    assert sorted(index["weight_map"]) == sorted(name for tensors in files.values() for name in tensors)
    total = sum(t.numel() * t.itemsize for tensors in files.values() for t in tensors.values())
    assert index["metadata"]["total_size"] == total
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.export(tmp_path / "one")
    assert not (tmp_path / "one/model.safetensors.index.json").exists()


@pytest.mark.parametrize("number", [0, 1, -1])
def test_46_missing_shard_is_an_error(number, tmp_path):
    """A folder that lacks a shard, whichever it is, or a tensor of one, neither loads nor verifies; the file is named."""
    base = tiny_folder("llama", tmp_path / "base", max_shard_size="20KB")
    shard = sorted(base.glob("*.safetensors"))[number]
    tensors = load_file(shard)
    shard.unlink()
    for check in (lambda: Engine.from_pretrained(base, CONFIG), lambda: verify_export(base)):
        with pytest.raises((ZftError, ExportError), match=f"lacks {shard.name}"):
            check()
    dropped = sorted(tensors)[0]
    save_file(
        {k: t for k, t in tensors.items() if k != dropped} or {"odd": torch.ones(1)}, shard, metadata={"format": "pt"}
    )
    for check in (lambda: Engine.from_pretrained(base, CONFIG), lambda: verify_export(base)):
        with pytest.raises((ZftError, ExportError), match=dropped.replace(".", r"\.")):
            check()
