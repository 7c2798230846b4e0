"""Saved at one world size, stage and placement, loaded at another: the same weights and moments, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.tiny import tiny_model
from zft.api import Engine, EngineConfig
from zft.checkpoint.manifest import Manifest
from zft.checkpoint.restore import ShardFiles
from zft.config import SGD, AdamW, ZftError
from zft.models.tensorfile import DTYPES
from zft.precision import Field

NVME = {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"}
CPU = {"param_tier": "cpu", "state_tier": "cpu", "grad_tier": "cpu"}
ARCH = {"arch": "llama_tied", "hidden_size": 24, "intermediate_size": 37, "vocab_size": 61, "num_hidden_layers": 3}
"""Odd sizes: no parameter fills its place, and shards cut through parameters."""


def engine(folder: Path, settings: dict, seed: int = 0, **model: object) -> Engine:
    options = {**ARCH, **model}
    built = tiny_model(options.pop("arch"), seed=seed, **options)
    return Engine(built, EngineConfig(compute_device="cpu", nvme_dir=str(folder / "nvme"), **settings))


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(5, 61, (2, 7), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}]


def train_and_save(folder: Path, name: str, settings: dict) -> tuple[dict, dict]:
    """Two steps, saved. ({fqn: master}, {field: {group: this rank's slab}}) as the engine's own parts have them."""
    with engine(folder, settings) as made:
        for step in range(2):
            made.step(batches(step), lr=0.01)
        made.save(folder / name, {"position": 17})
        masters = {fqn: tensor.numpy() for fqn, tensor in made.named_parameters()}
        slabs: dict[str, dict[str, tuple]] = {}
        for group, record in made.parts.records.items():
            for field in ("m", "v"):
                slab = record.slabs[field]
                values = slab.tensor if slab.resident else torch.empty(0, dtype=slab.dtype)
                spans = [(s.name, s.offset, s.end) for s in group.layout.spans]
                slabs.setdefault(field, {})[group.name] = (values.numpy().copy(), spans, group.replicated)
        return masters, slabs


def load_and_save(folder: Path, name: str, settings: dict) -> tuple[dict, float, int]:
    with engine(folder, settings, seed=5) as made:
        made.step(batches(9), lr=0.01)  # leaves an update waiting, which must not survive
        state = made.load(folder / name)
        assert state == {"position": 17}
        made.save(folder / f"{name}-again", state)
        masters = {fqn: tensor.numpy() for fqn, tensor in made.named_parameters()}
        return masters, made.step(batches(2), lr=0.01).loss, made.step_count


def stored(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """{(fqn, field): all of its entries}, put together from however many files."""
    manifest, found = Manifest.read(folder), {}
    files = ShardFiles(folder, manifest)
    for name, each in manifest.tensors.items():
        numel = torch.Size(each.shape).numel()
        for field, text in each.fields.items():
            dtype, _, block = text.partition("/")
            kind = Field(field, DTYPES[dtype], int(block or 1))
            found[name, field] = torch.empty(kind.entries(numel), dtype=kind.dtype)
            files.read(name, kind, 0, numel, found[name, field])
    files.close()
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


MOVES = [
    (2, {"stage": 3}, 1, {"stage": 3}),
    (2, {"stage": 3}, 3, {"stage": 3, **NVME}),
    (1, {"stage": 3, **NVME}, 2, {"stage": 1, **CPU}),
    (3, {"stage": 2, **CPU}, 2, {"stage": 0}),
    (2, {"stage": 0}, 3, {"stage": 2, "state_tier": "nvme"}),
    (3, {"stage": 1, "optim": AdamW(compact=True), **NVME}, 2, {"stage": 0, "optim": AdamW(compact=True), **NVME}),
    (2, {"stage": 3, "precision": "fp16"}, 1, {"stage": 3, "precision": "fp16", "param_tier": "nvme"}),
    (1, {"stage": 3, "precision": "fp32"}, 3, {"stage": 3, "precision": "fp32", **CPU}),
]


def _id(move: tuple) -> str:
    return "-".join(
        f"{ranks}x{'/'.join(str(getattr(v, 'compact', v)) for v in how.values())}"
        for ranks, how in (move[:2], move[2:])
    )


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES, ids=_id)
def test_equal_weights_and_moments_elsewhere(tmp_path, move):
    ranks, settings, other_ranks, other_settings = move
    saved = run_ranks(ranks, train_and_save, tmp_path, "a", settings)
    loaded = run_ranks(other_ranks, load_and_save, tmp_path, "a", other_settings)
    first, second = stored(tmp_path / "a"), stored(tmp_path / "a-again")
    assert first.keys() == second.keys() and {"hi", "m", "v"} <= {field for _, field in first}
    for key, entries in first.items():
        assert bits(entries) == bits(second[key]), key
    for fqn, master in saved[0][0].items():
        assert all(master.tobytes() == other[0][fqn].tobytes() for other in loaded), fqn
    losses = {loss for _, loss, _ in loaded}
    assert len(losses) == 1 and all(count == 3 for *_, count in loaded)


def test_what_is_stored_is_what_the_ranks_hold(tmp_path):
    """The moments in the files against the ranks' own buffers, laid end to end by hand."""
    ranks = run_ranks(3, train_and_save, tmp_path, "a", {"stage": 3})
    found = stored(tmp_path / "a")
    seen = set()
    for field in ("m", "v"):
        for group, (own, spans, replicated) in ranks[0][1][field].items():
            parts = [own] if replicated else [rank[1][field][group][0] for rank in ranks]
            flat = torch.cat([torch.from_numpy(part) for part in parts])
            for name, start, end in spans:
                assert flat[start:end].abs().sum() > 0
                assert bits(flat[start:end]) == bits(found[name, field]), (name, field)
                seen.add(name)
    assert seen == set(ranks[0][0])


def test_a_mismatch_names_what_differs_and_changes_nothing(tmp_path):
    from zft.dist import World

    def made(**model: object) -> Engine:
        settings = {key: model.pop(key) for key in ("optim", "precision") if key in model}
        options = {**ARCH, **model}
        built = tiny_model(options.pop("arch"), **options)
        return Engine(built, EngineConfig(compute_device="cpu", **settings), world=World.single("cpu"))

    with made() as source:
        source.step(batches(0), lr=0.01)
        source.save(tmp_path / "a")
    cases = {
        "embed_tokens.weight has shape .61, 24. there and .63, 24. here": {"vocab_size": 63},
        "layers.3.* is not in it": {"num_hidden_layers": 4},
        "layers.2.* is not in this model": {"num_hidden_layers": 2},
        "record hi:BF16 lo:I16 m:F32 v:F32 there and hi:F32 m:F32 v:F32 here": {"precision": "fp32"},
        "record hi:BF16 lo:I16 m:F32 v:F32 there and hi:BF16 lo:I16 m:F32 here": {"optim": SGD()},
        "lm_head.weight is not in it": {"tie_word_embeddings": False},
    }
    for text, change in cases.items():
        with made(**change) as other:
            before = {name: bits(tensor) for name, tensor in other.named_parameters()}
            with pytest.raises(ZftError, match=text):
                other.load(tmp_path / "a")
            assert before == {name: bits(tensor) for name, tensor in other.named_parameters()}
            other.step(batches(0), lr=0.01)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with made() as source, pytest.raises(ZftError, match="is no checkpoint; choose another"):
        source.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize("in_memory", [True, False])
def test_frozen_weights_are_stored_only_without_a_base(tmp_path, in_memory):
    """Case 42: a frozen layer comes back as it was, from the checkpoint or from the base model."""
    from tests.tiny import tiny_folder
    from zft.dist import World
    from zft.models.load import HubWeights, build_model

    folder = tiny_folder("llama", tmp_path / "base")

    def made(seed: int) -> Engine:
        model = build_model(folder, torch.bfloat16)
        source = HubWeights(folder, model)
        if in_memory:
            model, source = tiny_model("llama", seed=seed, dtype=torch.bfloat16), None
        model.model.layers[0].requires_grad_(False)
        return Engine(model, EngineConfig(compute_device="cpu"), source, World.single("cpu"))

    with made(0) as first:
        first.step(batches(0), lr=0.01)
        first.save(tmp_path / "a")
        expected = {name: bits(tensor) for name, tensor in first.named_parameters()}
    kinds = {each.kind for each in Manifest.read(tmp_path / "a").tensors.values()}
    assert ("frozen" in kinds) == in_memory
    with made(1) as second:
        second.load(tmp_path / "a")
        assert expected == {name: bits(tensor) for name, tensor in second.named_parameters()}


def test_another_base_under_frozen_weights_is_named(tmp_path):
    """The frozen layer would silently be another one."""
    from tests.tiny import tiny_folder
    from zft.dist import World
    from zft.models.load import HubWeights, build_model

    def made(folder: Path) -> Engine:
        model = build_model(folder, torch.bfloat16)
        source = HubWeights(folder, model)
        model.model.layers[0].requires_grad_(False)
        return Engine(model, EngineConfig(compute_device="cpu"), source, World.single("cpu"))

    with made(tiny_folder("llama", tmp_path / "base")) as first:
        first.save(tmp_path / "a")
    with made(tmp_path / "base") as same:
        same.load(tmp_path / "a")
    with made(tiny_folder("llama", tmp_path / "other", seed=1)) as other:
        with pytest.raises(ZftError, match="another base model: model.safetensors differs"):
            other.load(tmp_path / "a")
