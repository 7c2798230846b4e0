"""A checkpoint that FSDP2 wrote on three real ranks becomes a Hub folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import tiny_folder, tiny_model
from zft.checkpoint.foreign import consolidate

FSDP2 = """
import sys, torch, torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.tiny import tiny_model

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=int(sys.argv[2]), world_size=3)
model = tiny_model("llama_tied", seed=5, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
mesh = init_device_mesh("cpu", (3,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
checkpoint.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1] + "/dcp/step-1")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_fsdp2_over_three_ranks(tmp_path: Path) -> None:
    settings = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    base = tiny_folder("llama_tied", tmp_path / "base", dtype=torch.float32, **settings)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FSDP2, str(tmp_path), str(rank)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(3)
    ]
    for rank in ranks:
        _, error = rank.communicate(timeout=120)
        assert rank.returncode == 0, error.decode()[-2000:]
    consolidate(tmp_path / "dcp", tmp_path / "out", base)
    got = load_file(tmp_path / "out/model.safetensors")
    want = tiny_model("llama_tied", seed=5, **settings)
    assert "lm_head.weight" not in got
    assert all(torch.equal(got[name], parameter.data) for name, parameter in want.named_parameters())
