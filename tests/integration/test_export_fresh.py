"""Exports loaded by plain transformers in a fresh, offline process; custom code; memory of a larger model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import FAMILIES, tiny_folder, tiny_model
from zft.checkpoint.hf import export_folder
from zft.config import ZftError
from zft.models.load import HubWeights, build_model, load_tokenizer

FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
out = {}
for folder in sys.argv[2:]:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, trust_remote_code=sys.argv[1] == "1")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("hello, world").input_ids])
    out[folder] = {
        "info": {k: sorted(map(str, v)) for k, v in info.items() if v}, "dtype": str(model.dtype),
        "logits": model(ids).logits.float().tolist(), "template": tokenizer.chat_template,
        "zft": [name for name in sys.modules if name.split(".")[0] == "zft"]}
print("RESULT" + json.dumps(out))
"""


def fresh(*folders: Path, remote: bool = False) -> dict[str, dict]:
    """Each folder as a process sees it that has no network and has never heard of zft."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FRESH, str(int(remote)), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folders[0].parent, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.split("RESULT")[1])


def stream(model: torch.nn.Module):
    return iter([{name: tensor.detach()} for name, tensor in model.state_dict().items()])


def test_every_family_loads_offline_in_a_fresh_process(tmp_path: Path) -> None:
    want, folders = {}, []
    for arch in FAMILIES:
        base = tiny_folder(arch, tmp_path / f"{arch}-base")
        values, tokenizer = tiny_model(arch, seed=3), load_tokenizer(base)
        out = tmp_path / arch
        export_folder(out, stream(values), build_model(base), base, tokenizer=tokenizer, dtype=torch.float32)
        ids = torch.tensor([tokenizer("hello, world").input_ids])
        want[str(out)] = (values(ids).logits.detach(), tokenizer.chat_template)
        folders.append(out)
    got = fresh(*folders)
    assert len(got) == 17
    for folder, (logits, template) in want.items():
        one = got[folder]
        assert one["info"] == {} and one["dtype"] == "torch.float32" and one["template"] == template and not one["zft"]
        torch.testing.assert_close(torch.tensor(one["logits"]), logits, atol=1e-5, rtol=1e-5, msg=folder)


MODELING = """
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig
from .helper import double

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = double(output.logits)
        return output
"""
CONFIGURATION = """
from transformers import LlamaConfig
class MineConfig(LlamaConfig):
    model_type = "mine"
"""


def custom_folder(path: Path) -> Path:
    tiny_folder("llama", path)
    config = json.loads((path / "config.json").read_text())
    config["model_type"], config["architectures"] = "mine", ["MineForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling_mine.py").write_text(MODELING)
    (path / "configuration_mine.py").write_text(CONFIGURATION)
    (path / "helper.py").write_text("def double(x):\n    return x * 2\n")
    (path / "LICENSE").write_text("terms")
    return path


def test_custom_code_travels_and_runs_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = custom_folder(tmp_path / "base")
    with pytest.raises(ZftError, match="trust_remote_code=true"):
        build_model(base)
    model = build_model(base, trust_remote_code=True)
    weights = HubWeights(base, model)
    names = [name for name, _ in model.named_parameters()]
    export_folder(
        tmp_path / "out", ({n: t} for n, t in weights.read(names)), model, base, tokenizer=load_tokenizer(base)
    )
    assert {"modeling_mine.py", "configuration_mine.py", "helper.py", "LICENSE"} <= set(os.listdir(tmp_path / "out"))
    got = fresh(base, tmp_path / "out", remote=True)
    assert got[str(base)]["logits"] == got[str(tmp_path / "out")]["logits"] and got[str(tmp_path / "out")]["info"] == {}


MEASURE = """
import resource, sys
from zft.checkpoint.hf import export_folder
from zft.models.load import HubWeights, build_model

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

base, out = sys.argv[1:]
model = build_model(base)
weights = HubWeights(base, model)
before = peak()
names = [name for name, _ in model.named_parameters()]
export_folder(out, ({name: tensor} for name, tensor in weights.read(names)), model, base, max_shard_size="100MB")
print("PEAK", peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_folder("llama", base, hidden_size=512, intermediate_size=2048, num_hidden_layers=40, vocab_size=4096)
    size = (base / "model.safetensors").stat().st_size
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(base), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    peak = int(done.stdout.split("PEAK")[1])
    assert size > 300e6 and peak < 120e6, f"exporting {size / 1e6:.0f} MB took {peak / 1e6:.0f} MB"
    total = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(t.numel() * 2 for f in (tmp_path / "out").glob("*.safetensors") for t in load_file(f).values())
