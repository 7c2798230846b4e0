"""CASES e 40, 41, 42, 44, 46 and k 87, 88, 90: what people lose when a run ends. 87 and 90 have files of their own:
tests/integration/test_export_fresh.py (custom code) and tests/unit/test_push.py (uploads)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.tiny import CHATML, tiny_folder
from zft.api import AdamW, Engine, EngineConfig
from zft.checkpoint.hf import ExportError, verify_export
from zft.config import ZftError
from zft.models.load import build_model, load_tokenizer

CONFIG = EngineConfig(compute_device="cpu", optim=AdamW(lr=0.02))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def test_40_a_base_generation_config_that_transformers_refuses(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    (base / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.9, "eos_token_id": 2})
    )
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.step([batch()])
        report = engine.export(tmp_path / "out")
    assert "temperature=0.9" in report.warnings[0]
    GenerationConfig.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert verify_export(tmp_path / "out", base) == 21, "the weights are there all the same"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_41_header_request_and_config_agree(dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.export(tmp_path / "out", dtype=dtype)
    assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {dtype}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_42_frozen_weights_are_in_the_export(tmp_path: Path) -> None:
    from zft.models.load import HubWeights

    base = tiny_folder("llama", tmp_path / "base")
    model = build_model(base)
    model.model.layers[0].requires_grad_(False)
    with Engine(model, CONFIG, source=HubWeights(base, model)) as engine:
        engine.step([batch()])
        engine.export(tmp_path / "out")
    old, new = load_file(base / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    frozen = {name for name in old if ".layers.0." in name}
    assert len(frozen) == 9 and all(torch.equal(old[name], new[name]) for name in frozen)
    assert any(not torch.equal(old[name], new[name]) for name in old.keys() - frozen)


def test_44_the_export_has_all_bytes_of_the_model(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    with Engine.from_pretrained(base, CONFIG) as engine:
        report = engine.export(tmp_path / "out")
    numel = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "out").parameters())
    assert report.total_bytes == numel * 2
    size, header = (tmp_path / "out/model.safetensors").stat().st_size, 8
    with open(tmp_path / "out/model.safetensors", "rb") as file:
        header += int.from_bytes(file.read(8), "little")
    assert size == report.total_bytes + header


def test_46_index_files_totals_and_a_deleted_shard(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base", max_shard_size="12KB")
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.export(tmp_path / "out", max_shard_size="20KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    on_disk = {each.name for each in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == on_disk, "the base's index is not copied"
    total = sum(t.numel() * t.itemsize for name in on_disk for t in load_file(tmp_path / "out" / name).values())
    assert index["metadata"]["total_size"] == total
    (tmp_path / "out" / sorted(on_disk)[0]).unlink()
    with pytest.raises(ZftError, match="lacks model-00001"):
        Engine.from_pretrained(tmp_path / "out", CONFIG)
    with pytest.raises(ExportError, match="lacks model-00001"):
        verify_export(tmp_path / "out")


def test_88_the_template_trained_with_comes_back(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(base)
    assert tokenizer.chat_template is None
    tokenizer.chat_template = CHATML
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.export(tmp_path / "set", tokenizer=tokenizer)
        engine.export(tmp_path / "given", tokenizer=load_tokenizer(base), chat_template=CHATML)
    for name in ("set", "given"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == CHATML
