"""`zft export`: what comes out of a run's checkpoint is what the run itself exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.test_cli import refused, zft
from tests.tiny import tiny_folder

pytestmark = pytest.mark.slow
CHAT = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}
ARGS = ["run", "sft", "model=model", "data=chats.jsonl", "train.steps=2", "train.lr=1e-2", "train.grad_accum_steps=1"]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with a full run and a LoRA run."""
    folder = tmp_path_factory.mktemp("export")
    tiny_folder("llama", folder / "model")
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": 4}')  # the turns end with 2
    (folder / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 3)
    for args in (["out=full"], ["out=lora", "method=lora", "method.r=4"]):
        result = zft(*ARGS, *args, cwd=folder)
        assert result.returncode == 0, result.stderr
    return folder


def same(first: Path, second: Path) -> bool:
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_a_run_and_its_checkpoint(here):
    assert zft("export", "full", "again", cwd=here).returncode == 0
    assert zft("export", "full/checkpoints/step-00000002", "wide", "--dtype", "fp32", cwd=here).returncode == 0
    exported = here / "full" / "export"
    assert {path.name for path in exported.iterdir()} == {path.name for path in (here / "again").iterdir()}
    assert same(exported / "model.safetensors", here / "again" / "model.safetensors")
    wide, narrow = load_file(here / "wide" / "model.safetensors"), load_file(exported / "model.safetensors")
    for name, tensor in wide.items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, narrow[name].float(), rtol=2**-8, atol=0), name
    assert json.loads((here / "wide" / "config.json").read_text())["dtype"] == "float32"
    for folder in (exported, here / "again", here / "wide"):
        assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [4, 2]}, folder


def test_an_adapter_and_its_merge(here):
    assert zft("export", "lora", "adapter", cwd=here).returncode == 0
    assert same(here / "lora" / "export" / "adapter_model.safetensors", here / "adapter" / "adapter_model.safetensors")
    assert zft("export", "lora", "merged", "--merge", cwd=here).returncode == 0
    assert json.loads((here / "merged" / "generation_config.json").read_text()) == {"eos_token_id": [4, 2]}
    base, merged = load_file(here / "model" / "model.safetensors"), load_file(here / "merged" / "model.safetensors")
    adapter = load_file(here / "adapter" / "adapter_model.safetensors")
    assert base.keys() == merged.keys()
    a, b = (adapter[f"base_model.model.model.layers.1.mlp.up_proj.lora_{part}.weight"] for part in "AB")
    name = "model.layers.1.mlp.up_proj.weight"
    expected = (base[name].float() + 32 / 4 * (b @ a)).to(base[name].dtype)
    assert b.abs().max() > 0 and torch.equal(merged[name], expected)
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["gone", "x"], "no folder 'gone'"),
        (["full", "model"], "not empty"),
        (["full", "x", "--dtype", "int8"], "got 'int8'"),
        (["full", "x", "--merge"], "--merge is for adapters"),
        (["model", "x"], "neither a zft run"),
        (["full", "x", "--max-shard-size", "big"], "big"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input(here, args, said):
    refused(zft("export", *args, cwd=here), said)
    assert not (here / "x").exists()
