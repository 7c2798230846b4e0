"""The arithmetic and the files of checkpoints: who stores what, manifests, shard files, retention."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from zft.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    StoredFile,
    StoredTensor,
    is_complete,
    overlaps,
    tensor_key,
)
from zft.checkpoint.shard import ShardWriter
from zft.config import Tier
from zft.engine import snapshot
from zft.engine.layout import FlatLayout
from zft.engine.record import Ranges
from zft.engine.snapshot import own_range, parts_of, restore_record, stream_field
from zft.precision import Field
from zft.tiers.nvme import NvmeFolder
from zft.tiers.slab import FileSlab, MemorySlab, Traffic
from zft.train import checkpoints

SHAPES = st.lists(st.lists(st.integers(0, 70), min_size=0, max_size=2).map(tuple), min_size=1, max_size=6)
FIELDS = (
    Field("hi", torch.bfloat16),
    Field("lo", torch.int8),
    Field("m", torch.float32),
    Field("m_scale", torch.float32, 256),
)


def group_of(shapes: list[tuple[int, ...]], ranks: int, replicated: bool = False) -> SimpleNamespace:
    layout = FlatLayout.of([(f"p{i}", shape, True) for i, shape in enumerate(shapes)], 1 if replicated else ranks)
    return SimpleNamespace(
        layout=layout, replicated=replicated, pending="waiting", stale=True, outdated=False, flat=None,
        hi_dtype=torch.bfloat16, name="g",
    )  # fmt: skip


@given(SHAPES, st.integers(1, 5), st.booleans())
def test_every_element_is_stored_once(shapes, ranks, replicated):
    group = group_of(shapes, ranks, replicated)
    found: dict[str, list[tuple[int, int]]] = {f"p{i}": [] for i in range(len(shapes))}
    for rank in range(ranks):
        for part in parts_of(group, rank):
            assert part.first < part.last and part.first % 256 == 0
            found[part.name].append((part.first, part.last))
    for index, shape in enumerate(shapes):
        at = 0
        for first, last in found[f"p{index}"]:
            assert first == at
            at = last
        assert at == math.prod(shape)


def fields_on(folder: NvmeFolder | None) -> tuple[Field, ...]:
    """Files are written at pages: a chunk as small as in these tests has less than a page of scales."""
    return FIELDS if folder is None else FIELDS[:3]


def test_a_chunk_is_a_number_of_pages_in_every_field():
    assert all(snapshot.CHUNK_NUMEL // field.block * field.dtype.itemsize % 4096 == 0 for field in FIELDS)


def record_of(group: SimpleNamespace, ranks: int, rank: int, stage: int, folder: NvmeFolder | None, fill: bool):
    """A record whose `hi` and state fields hold distinct numbers in every element of a parameter, junk in the padding."""
    world = SimpleNamespace(mesh=SimpleNamespace(shard_rank=rank))
    ranges = Ranges.of(group, stage, world)
    record = SimpleNamespace(group=group, ranges=ranges, rule=SimpleNamespace(fields=fields_on(folder)), slabs={})
    for number, field in enumerate(fields_on(folder)):
        start, numel = (
            (ranges.hi_start, ranges.hi_numel) if field.name == "hi" else (ranges.state_start, ranges.state_numel)
        )
        whole = _values(group.layout.padded_numel, field, number)
        own = whole[start // field.block : (start + numel) // field.block].clone()
        own = own if fill else torch.full_like(own, 77)
        if folder is None:
            record.slabs[field.name] = MemorySlab(own, Tier.cpu)
            continue
        nbytes = -(-own.nbytes // 4096) * 4096
        file = folder.create(f"{rank}-{stage}-{fill}-{field.name}", nbytes + 4096)
        record.slabs[field.name] = FileSlab(file, 4096, field.dtype, Traffic())
        buffer = snapshot.aligned_empty(max(own.nbytes, 1))[: own.nbytes].view(field.dtype).copy_(own)
        record.slabs[field.name].write(0, buffer).result()
    return record


def _values(numel: int, field: Field, number: int) -> torch.Tensor:
    bits = torch.arange(numel // field.block, dtype=torch.int64) * 7 + number
    return bits.to(torch.int8 if field.dtype == torch.int8 else torch.int16).to(field.dtype)


def held(record: SimpleNamespace, field: Field) -> torch.Tensor:
    slab = record.slabs[field.name]
    start, numel = snapshot._field_range(record, field)
    if slab.resident:
        return slab.tensor
    out = snapshot.aligned_empty(numel * 4)[: numel // field.block * field.dtype.itemsize].view(field.dtype)
    slab.read(0, out).result()
    return out


@pytest.mark.parametrize("on_nvme", [False, True])
@settings(deadline=None, max_examples=60)
@given(
    shapes=SHAPES,
    ranks=st.integers(1, 4),
    stage=st.integers(0, 3),
    others=st.integers(1, 4),
    other_stage=st.integers(0, 3),
)
def test_streamed_and_restored_elsewhere(tmp_path_factory, on_nvme, shapes, ranks, stage, others, other_stage):
    """Out of records of some ranks and stage, into records of others: what lies in parameters is equal, padding is zero."""
    folder = NvmeFolder(tmp_path_factory.mktemp("tier")) if on_nvme else None
    before, snapshot.CHUNK_NUMEL = snapshot.CHUNK_NUMEL, 4096
    try:
        stored: dict[tuple[str, str], list[tuple[int, int, torch.Tensor]]] = {}
        group = group_of(shapes, ranks)
        for rank in range(ranks):
            record = record_of(group, ranks, rank, stage, folder, fill=True)
            for field in fields_on(folder):
                parts = [p.clone() for p in stream_field(record, field, rank)]
                flat = torch.cat(parts) if parts else torch.empty(0, dtype=field.dtype)
                for part in parts_of(group, rank):
                    count = field.entries(part.last - part.first)
                    stored.setdefault((part.name, field.name), []).append((part.first, part.last, flat[:count]))
                    flat = flat[count:]
                assert not flat.numel()

        def read(name: str, field: Field, first: int, last: int, out: torch.Tensor) -> None:
            for start, end, entries in stored[name, field.name]:
                low, high = max(start, first), min(end, last)
                if low < high:
                    piece = entries[(low - start) // field.block : -(-(high - start) // field.block)]
                    out[(low - first) // field.block : -(-(high - first) // field.block)].copy_(piece)

        other = group_of(shapes, others)
        for rank in range(others):
            record = record_of(other, others, rank, other_stage, folder, fill=False)
            restore_record(record, read)
            for number, field in enumerate(fields_on(folder)):
                start, numel = snapshot._field_range(record, field)
                there = {s.name: _values(group.layout.padded_numel, field, number) for s in group.layout.spans}
                expected = torch.zeros(numel // field.block, dtype=field.dtype)
                for index, first, last in other.layout.pieces(start, start + numel):
                    old, new = group.layout.spans[index], other.layout.spans[index]
                    source = there[old.name][(old.offset + first - new.offset) // field.block :]
                    count = -(-(last - first) // field.block)
                    expected[(first - start) // field.block :][:count] = source[:count]
                assert torch.equal(held(record, field), expected)
        assert (other.pending, other.stale) == (None, False)
    finally:
        snapshot.CHUNK_NUMEL = before
        if folder is not None:
            folder.close()


def test_ranges_of_a_replicated_group_are_rank_0s():
    group = group_of([(3, 5)], 4, replicated=True)
    assert own_range(group, 0) == (0, group.layout.padded_numel) and own_range(group, 1) == (0, 0)
    assert parts_of(group, 3) == []


def manifest(**train: object) -> Manifest:
    tensors = {"a.weight": StoredTensor("trained", (3, 400), {"hi": "BF16"}, [("x", 0, 1024), ("y", 1024, 1200)])}
    return Manifest({"x": StoredFile(3, "00"), "y": StoredFile(0, "11")}, tensors, {"step_count": 5}, train)


def written(folder: Path, content: Manifest) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(content.to_json(), encoding="utf-8")
    for name, file in content.files.items():
        (folder / name).write_bytes(bytes(file.nbytes))
    return folder


def test_a_manifest_comes_back_as_it_was(tmp_path):
    train = {
        "loss": math.inf,
        "name": "naïve ✓",
        "small": 1e-300,
        "third": 1 / 3,
        "none": None,
        "nested": {"a": [1, 2]},
    }
    content = manifest(**train)
    assert Manifest.read(written(tmp_path / "c", content)) == content
    assert math.isnan(Manifest.read(written(tmp_path / "d", manifest(loss=math.nan))).train["loss"])


def test_any_changed_byte_of_a_manifest_is_found(tmp_path):
    folder = written(tmp_path / "c", manifest(position=17, best=math.inf))
    path = folder / "manifest.json"
    raw = path.read_bytes()
    for at in range(len(raw)):
        for bit in (0x01, 0x10):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :])
            with pytest.raises(DamagedCheckpoint):
                Manifest.read(folder)
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        assert not is_complete(folder)
    path.write_bytes(raw)
    assert is_complete(folder)


def test_a_manifest_of_another_format_is_named(tmp_path):
    folder = written(tmp_path / "c", manifest())
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(DamagedCheckpoint, match="has format 99, and this zft reads 2"):
        Manifest.read(folder)


def test_a_missing_or_short_file_is_named(tmp_path):
    folder = written(tmp_path / "c", manifest())
    (folder / "x").write_bytes(b"12")
    with pytest.raises(DamagedCheckpoint, match="x has 2 bytes instead of 3"):
        Manifest.read(folder)
    (folder / "x").unlink()
    with pytest.raises(DamagedCheckpoint, match="x has None bytes"):
        Manifest.read(folder)


def test_pieces_that_make_up_a_range():
    stored = manifest().tensors["a.weight"]
    assert list(overlaps(stored, 0, 1200)) == [(("x", 0, 1024), 0, 1024), (("y", 1024, 1200), 1024, 1200)]
    assert list(overlaps(stored, 1000, 1030)) == [(("x", 0, 1024), 1000, 1024), (("y", 1024, 1200), 1024, 1030)]
    assert list(overlaps(stored, 5, 5)) == []
    for pieces, first in ((stored.pieces[:1], 1024), (stored.pieces[1:], 0)):
        torn = StoredTensor("trained", (3, 400), {"hi": "BF16"}, pieces)
        with pytest.raises(DamagedCheckpoint, match=f"elements {first} to 1200"):
            list(overlaps(torn, 0, 1200))


@pytest.mark.parametrize("buffer_bytes", [4096, 8192, 1 << 20])
def test_a_shard_is_a_safetensors_file(tmp_path, monkeypatch, buffer_bytes):
    from zft.checkpoint.manifest import file_digest
    from zft.tiers import direct

    monkeypatch.setattr(direct, "BUFFER_BYTES", buffer_bytes)
    tensors = {
        tensor_key("a.weight", "hi", 0): torch.arange(7, dtype=torch.bfloat16),
        tensor_key("a.weight", "m", 256): torch.arange(5003, dtype=torch.float32),
        tensor_key("b", "v", 0): torch.arange(3, dtype=torch.uint8),
        tensor_key("empty", "v", 0): torch.empty(0),
    }
    planned = [(key, tensor.dtype, tensor.numel()) for key, tensor in tensors.items()]
    writer = ShardWriter(tmp_path / "x.safetensors", planned)
    for tensor in tensors.values():
        for part in tensor.split(2):
            writer.write(part)
    stored = writer.finish()
    assert stored == StoredFile((tmp_path / "x.safetensors").stat().st_size, file_digest(tmp_path / "x.safetensors"))
    found = load_file(tmp_path / "x.safetensors")
    digests = [xxhash.xxh3_64_intdigest(tensor.view(torch.uint8).numpy().tobytes()) for tensor in tensors.values()]
    assert [value % 2**64 for value in found.pop("digests").tolist()] == digests
    assert found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in tensors)
    with pytest.raises(AssertionError, match="were planned"):
        ShardWriter(tmp_path / "y.safetensors", planned).finish()


def saved(folder: Path, *steps: int) -> None:
    for number in steps:
        written(checkpoints.step_folder(folder, number), manifest())


@given(
    st.dictionaries(st.integers(1, 30), st.none() | st.floats(0, 9), max_size=8),
    st.sets(st.integers(31, 40)),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=30)
def test_retention_goes_by_the_record(tmp_path_factory, record, strangers, keep):
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, *record, *strangers)
    (folder / "notes").mkdir()
    kept = checkpoints.prune(folder, list(record.items()), keep)
    stay = set(sorted(record)[-keep:])
    evaluated = {step: loss for step, loss in record.items() if loss is not None}
    if evaluated:
        best = min(evaluated.values())
        assert any(loss == best and step in dict(kept) for step, loss in evaluated.items()), "the best stays"
    assert stay <= set(dict(kept)) and len(kept) <= keep + 1
    assert set(checkpoints.steps(folder)) == set(dict(kept)) | strangers, "and nothing that is not in the record goes"
    assert (folder / "notes").is_dir() and not list(folder.glob(".tmp*"))


def test_the_newest_whole_checkpoint(tmp_path):
    assert checkpoints.newest(tmp_path) is None and checkpoints.candidates(tmp_path / "none") == []
    saved(tmp_path, 1, 3)
    written(tmp_path / "step-00000003.old", manifest())
    written(tmp_path / ".tmp-step-00000009", manifest())
    written(tmp_path / "step-00000012-copy", manifest())
    (tmp_path / "step-00000007").mkdir()
    assert [path.name for path in checkpoints.candidates(tmp_path)] == [
        "step-00000007", "step-00000003", "step-00000003.old", "step-00000001"
    ]  # fmt: skip
    assert checkpoints.newest(tmp_path).name == "step-00000003" and checkpoints.steps(tmp_path) == [1, 3]
    (tmp_path / "step-00000003" / "x").unlink()
    assert checkpoints.newest(tmp_path).name == "step-00000003.old" and checkpoints.steps(tmp_path) == [1, 3]
