"""Cases b: tied embeddings, saved, consolidated, adapted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.adapters import base_folder, engine_config, method, peft_model, random_adapter
from tests.cases.shares import row
from tests.harness import run_ranks
from tests.tiny import tiny_folder
from tests.unit.test_foreign import FIXTURES, SETTINGS
from zft.api import Engine
from zft.checkpoint.foreign import consolidate
from zft.checkpoint.hf import ExportError, export_folder
from zft.checkpoint.source import StoredWeights
from zft.config import AdamW, EngineConfig, ZftError
from zft.models.load import HubWeights, build_model

HEADS = {"llama_tied": ("model.embed_tokens", "lm_head"), "gpt2": ("transformer.wte", "lm_head"),
         "gemma2": ("model.embed_tokens", "lm_head")}  # fmt: skip
IDS = torch.arange(5, 37).view(2, 16)


def trained_export(base: str, folder: str, shard: str, settings: dict) -> None:
    """On each rank: two steps of every weight, an export, and a checkpoint."""
    rank = int(os.environ.get("RANK", 0))
    config = EngineConfig(**{"compute_device": "cpu", "timeout_s": 60, "optim": AdamW(lr=0.02), **settings})
    with Engine.from_pretrained(base, config) as engine:
        for _ in range(2):
            engine.step([row(9, rank)])
        engine.export(f"{folder}/out", max_shard_size=shard)
        engine.save(f"{folder}/checkpoint")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def assert_one_key(folder: Path, arch: str) -> torch.Tensor:
    """One key, loaded without complaint, the head an alias; returns the matrix."""
    embedding, head = HEADS[arch]
    tensors = tensors_of(folder)
    assert f"{embedding}.weight" in tensors and f"{head}.weight" not in tensors
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    ends = model.get_submodule(embedding).weight, model.get_submodule(head).weight
    assert ends[0].data_ptr() == ends[1].data_ptr() and torch.equal(ends[1].data, tensors[f"{embedding}.weight"])
    return tensors[f"{embedding}.weight"]


@pytest.mark.parametrize("arch", HEADS)
def test_10_tied_model_is_saved_under_one_key(arch, tmp_path):
    """An export keeps one key of the tied pair (the embedding's), and reloads with the head aliased to it."""
    base = tiny_folder(arch, tmp_path / "base")
    trained_export(str(base), str(tmp_path), "50GB", {})
    matrix = assert_one_key(tmp_path / "out", arch)
    assert not torch.equal(matrix, tensors_of(base)[f"{HEADS[arch][0]}.weight"]), "it was trained"


@pytest.mark.parametrize("stage", [2, 3])
def test_10_tied_foreign_checkpoint_is_consolidated_under_one_key(stage, tmp_path):
    """A DeepSpeed ZeRO checkpoint of a tied model is consolidated to safetensors with one key of the pair."""
    base = tiny_folder("llama_tied", tmp_path / "base", **SETTINGS)
    consolidate(FIXTURES / f"stage{stage}", tmp_path / "out", base)
    assert_one_key(tmp_path / "out", "llama_tied")


@pytest.mark.parametrize(
    ("size", "arch", "settings"),
    [
        (1, "llama_tied", {}),
        (2, "llama_tied", {}),
        (3, "llama_tied", {}),
        (2, "gpt2", {}),
        (2, "llama_tied", {"stage": 1}),
    ],
    ids=str,
)
def test_11_tied_matrix_is_counted_once(size, arch, settings, tmp_path):
    """After full training on ranks the sharded export has no key of the head, and total_size counts the matrix once."""
    base = tiny_folder(arch, tmp_path / "base")
    run_ranks(size, trained_export, str(base), str(tmp_path), "8KB", settings)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    tensors = tensors_of(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    total = sum(t.numel() * t.itemsize for t in tensors.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert index["metadata"]["total_size"] == total == sum(p.numel() * 2 for p in model.parameters())
    assert_one_key(tmp_path / "out", arch)


@pytest.mark.parametrize(("size", "arch"), [(2, "llama_tied"), (1, "gemma2"), (3, "gpt2")])
def test_12_tied_head_comes_out_of_a_checkpoint(size, arch, tmp_path):
    """A checkpoint holds the pair once and knows both names: what is exported from it has head == embedding, bitwise."""
    base = tiny_folder(arch, tmp_path / "base")
    run_ranks(size, trained_export, str(base), str(tmp_path), "50GB", {})
    stored = StoredWeights(tmp_path / "checkpoint")
    export_folder(tmp_path / "later", stored.units(torch.bfloat16), build_model(base), base, dtype=torch.bfloat16)
    stored.close()
    assert torch.equal(assert_one_key(tmp_path / "later", arch), assert_one_key(tmp_path / "out", arch))


# 14: adapters on one of the two


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama_tied", {"targets": ("lm_head",)}),
        ("llama_tied", {"targets": ("embed_tokens", "q_proj")}),
        ("llama_tied", {"modules_to_save": ("lm_head",)}),
        ("llama_tied", {"targets": (r".*(head|q_proj)",)}),
        ("gemma2", {"modules_to_save": ("embed_tokens",)}),
        ("gpt2", {"targets": ("wte",)}),
    ],
    ids=str,
)
def test_14_tied_adapter_is_refused_before_training(arch, options, tmp_path):
    """An adapter or a full copy on the embedding or the head of a tied model is refused before any weight is read."""
    base = base_folder(arch, tmp_path / "base")
    (base / "model.safetensors").chmod(0o400)
    with pytest.raises(ZftError, match="share one weight.*leave it out, or untie"):
        Engine.from_pretrained(base, engine_config(), method=method(**options))


@pytest.mark.parametrize("options", [{"targets": ("lm_head",)}, {"targets": ("embed_tokens",)},
                                     {"modules_to_save": ("lm_head",)}], ids=str)  # fmt: skip
def test_14_untied_head_survives_merge_and_reload(options, tmp_path):
    """On an untied model the merged head reloads with the same logits, and the config says tie_word_embeddings=false."""
    base = base_folder("llama", tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "adapter", method(**options))
    with Engine.from_pretrained(base, engine_config(), method=method(adapter=str(adapter), **options)) as engine:
        engine.export(tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (logits(merged) - logits(peft_model(base, adapter))).abs().max() <= 1e-5
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))).abs().max() > 1e-3
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= tensors_of(tmp_path / "merged").keys()


def test_14_head_that_is_stored_apart_is_untied(tmp_path):
    """A folder whose config says tied but whose file has two different matrices is exported with both and says untied."""
    base = base_folder("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    options = {"targets": ("lm_head",)}
    with Engine.from_pretrained(base, engine_config(), method=method(**options)) as engine:
        engine.export(tmp_path / "merged", merge=True)
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "B is zero"
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False


# 15: names under wrappers


def adapter_exports(base: str, adapter: str, folder: str) -> None:
    with Engine.from_pretrained(base, engine_config(timeout_s=60.0), method=method(adapter=adapter)) as engine:
        engine.export(f"{folder}/adapter")
        engine.export(f"{folder}/merged", merge=True)


@pytest.mark.parametrize(("size", "arch"), [(2, "llama_tied"), (3, "gemma2"), (1, "gpt2")])
def test_15_tied_key_is_known_under_a_wrapper(size, arch, tmp_path):
    """Under PEFT and ZeRO-3 the tied key is recognised by what it aliases: adapter and merged export are whole."""
    base = base_folder(arch, tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "start", method())
    run_ranks(size, adapter_exports, str(base), str(adapter), str(tmp_path))
    assert_one_key(tmp_path / "merged", arch)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (logits(merged) - logits(peft_model(base, tmp_path / "adapter"))).abs().max() <= 1e-5


@pytest.mark.parametrize("missing", ["model.embed_tokens.weight", "model.norm.weight"])
def test_15_truly_missing_key_still_fails(missing, tmp_path):
    """A weight that nothing gives is an error by its name, for an export and for a load; nothing appears in its place."""
    base = base_folder("llama_tied", tmp_path / "base")
    model = build_model(base)
    names = [name for name, _ in model.named_parameters() if name != missing]
    with pytest.raises(ExportError, match=f"never given, among them {missing}"):
        export_folder(tmp_path / "out", iter([dict(HubWeights(base, model).read(names))]), model, base)
    assert not (tmp_path / "out").exists()
    tensors = load_file(base / "model.safetensors")
    tensors.pop(missing)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ZftError, match=missing):
        Engine.from_pretrained(base, engine_config())
