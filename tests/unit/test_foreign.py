"""Checkpoints that DeepSpeed 0.19.8 and torch really wrote, consolidated; and files that try to run code."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_folder, tiny_model
from zft.checkpoint.dcp import DcpSource, read_metadata
from zft.checkpoint.foreign import consolidate, foreign_kind
from zft.checkpoint.zero import ZeroSource, _Joined, load_inert
from zft.config import ZftError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "deepspeed"
SETTINGS = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "vocab_size": 37,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def save_dcp(state: dict, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_masters_are_exact(stage: int, tmp_path: Path) -> None:
    base = tiny_folder("llama_tied", tmp_path / "base", **SETTINGS)
    folder = FIXTURES / f"stage{stage}"
    assert foreign_kind(folder) == "deepspeed"
    consolidate(folder, tmp_path / "out", base, dtype=torch.float32)
    got, want = load_file(tmp_path / "out/model.safetensors"), load_file(folder / "reference.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name

    consolidate(folder / "global_step2", tmp_path / "half", base)
    got = load_file(tmp_path / "half/model.safetensors")
    assert all(torch.equal(got[name], tensor.bfloat16()) for name, tensor in want.items()), (
        "the base's dtype, one rounding"
    )
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "half", output_loading_info=True)
    assert not any(info.values())


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    base = tiny_folder("llama_tied", tmp_path / "base", **SETTINGS)
    folder = Path(shutil.copytree(FIXTURES / "stage3", tmp_path / "ds"))
    (folder / "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ZftError, match="1 of 2 ranks"):
        consolidate(folder, tmp_path / "out", base)
    (folder / "latest").write_text("global_step9")
    with pytest.raises(ZftError, match="global_step9, which has no"):
        consolidate(folder, tmp_path / "out", base)
    (folder / "latest").write_text("../elsewhere")
    with pytest.raises(ZftError, match="outside its folder"):
        consolidate(folder, tmp_path / "out", base)
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    with pytest.raises(ZftError, match="has shape|no tensor for"):
        consolidate(FIXTURES / "stage3", tmp_path / "out", base)
    with pytest.raises(ZftError, match="is no checkpoint that zft knows"):
        consolidate(base, tmp_path / "out", base)


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    torch.save({"x": Bomb(tmp_path / "ran"), "y": torch.ones(2)}, tmp_path / "bad.pt")
    try:
        loaded = load_inert(tmp_path / "bad.pt")
        assert torch.equal(loaded["y"], torch.ones(2))
    except ZftError:
        pass
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ZftError, match="is not the metadata of a torch checkpoint"):
        read_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists(), "the bomb must work where pickles are trusted, else this test shows nothing"


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "app.model.", "weird.place."])
def test_dcp_under_any_prefix(prefix: str, tmp_path: Path) -> None:
    base, model = tiny_folder("qwen2", tmp_path / "base"), tiny_model("qwen2", seed=4)
    state = {prefix + name.replace("layers.0.", "layers.0._orig_mod."): t for name, t in model.state_dict().items()}
    state |= {f"optimizer.{name}.exp_avg": t for name, t in model.state_dict().items()}
    save_dcp({**state, "step": 3}, tmp_path / "dcp")
    assert foreign_kind(tmp_path / "dcp") == "dcp"
    consolidate(tmp_path / "dcp", tmp_path / "out", base, dtype=torch.float32)
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == model.state_dict().keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in model.state_dict().items())


def test_dcp_in_the_hubs_own_layout_is_fused_and_back(tmp_path: Path) -> None:
    base = tiny_folder("mixtral", tmp_path / "base", dtype=torch.float32)
    hub = load_file(base / "model.safetensors")
    assert any(".experts.3." in name for name in hub)
    save_dcp({"model": {name: t * 2 for name, t in hub.items()}}, tmp_path / "dcp")
    consolidate(tmp_path / "dcp", tmp_path / "out", base)
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == hub.keys() and all(torch.equal(got[name], t * 2) for name, t in hub.items())


def test_dcp_with_added_tokens(tmp_path: Path) -> None:
    base, model = tiny_folder("llama", tmp_path / "base"), tiny_model("llama", vocab_size=67)
    save_dcp({"model": model.state_dict()}, tmp_path / "dcp")
    consolidate(tmp_path / "dcp", tmp_path / "out", base)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.shape == (67, 32)


def test_dcp_with_a_missing_file_or_weight(tmp_path: Path) -> None:
    base, model = tiny_folder("llama", tmp_path / "base"), tiny_model("llama")
    state = {name: t for name, t in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    save_dcp({"model": state}, tmp_path / "dcp")
    with pytest.raises(ZftError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        consolidate(tmp_path / "dcp", tmp_path / "out", base)
    next((tmp_path / "dcp").glob("*.distcp")).unlink()
    with pytest.raises(ZftError, match="lacks __0_0.distcp"):
        DcpSource(tmp_path / "dcp")


def test_pieces_of_joined_tensors() -> None:
    joined = _Joined([torch.arange(3), torch.arange(3, 4), torch.arange(4, 9)])
    for start in range(10):
        for numel in range(10):
            want = list(range(start, min(9, start + numel)))
            assert [int(x) for piece in joined.pieces(start, numel) for x in piece] == want


def test_zero_source_reads_views_only() -> None:
    source = ZeroSource(FIXTURES / "stage3")
    assert source.shape("model.embed_tokens.weight") == (37, 16) and source.dtype("model.norm.weight") == torch.float32
    assert source.dtype("model.layers.0.mlp.up_proj.weight") == torch.bfloat16, "frozen parameters have no master"
