"""Cases k: exports that stand alone, and uploads of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.adapters import engine_config, method
from tests.integration.test_export_fresh import custom_folder, fresh
from tests.tiny import CHATML, CHATML_PLAIN, tiny_folder
from tests.toy import same_bits, weights_of
from tests.unit.test_push import folder, server, visible  # noqa: F401
from zft.api import Engine
from zft.checkpoint.push import PushError, push
from zft.cli import main
from zft.config import ZftError
from zft.models.load import load_tokenizer

ROOT = Path(__file__).parents[2]


UNTRUSTED = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
"""


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


# 87


def python_files(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.glob("*.py")}


@pytest.mark.parametrize("kind", ["full", "merged"])
def test_87_custom_code_of_a_local_base(kind, tmp_path, monkeypatch):
    """Custom .py files of the base are in the export, which loads offline with `trust_remote_code` and not without.

    Not reported: code that imports another file, and a merged adapter.
    """
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = custom_folder(tmp_path / "base")
    with pytest.raises(ZftError, match="trust_remote_code=true"):
        Engine.from_pretrained(base, engine_config())
    options = {"method": method()} if kind == "merged" else {}
    with Engine.from_pretrained(base, engine_config(), trust_remote_code=True, **options) as engine:
        engine.step([batch()])
        engine.export(tmp_path / "out", tokenizer=load_tokenizer(base), merge=kind == "merged")
        engine.save(tmp_path / "step-00000001")
        with Engine.from_pretrained(base, engine_config(), trust_remote_code=True, **options) as resumed:
            resumed.load(tmp_path / "step-00000001")
            assert same_bits(weights_of(engine), weights_of(resumed))
    assert python_files(tmp_path / "out") == python_files(base)
    got = fresh(tmp_path / "out", remote=True)[str(tmp_path / "out")]
    assert got["info"] == {}
    with pytest.raises(ZftError, match="trust_remote_code=true"):
        Engine.from_pretrained(tmp_path / "out", engine_config())
    command = [sys.executable, "-c", UNTRUSTED, tmp_path / "out"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0 and "trust_remote_code" in refused.stderr


EXPORT = """
import sys
from zft.api import Engine
from tests.adapters import engine_config
from zft.models.load import load_tokenizer
with Engine.from_pretrained(sys.argv[1], engine_config(), trust_remote_code=True) as engine:
    engine.export(sys.argv[2], tokenizer=load_tokenizer(sys.argv[1]))
"""


def test_87_custom_code_of_another_repository(tmp_path):
    """Code that the base names in another repository of the Hub's cache is copied, so that the export needs neither."""
    base, cache = custom_folder(tmp_path / "base"), tmp_path / "hub"
    snapshot = cache / "models--me--code" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "models--me--code" / "refs").mkdir()
    (cache / "models--me--code" / "refs" / "main").write_text("a" * 40)
    code = python_files(base)
    for name, text in code.items():
        (snapshot / name).write_text(text)
        (base / name).unlink()
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {key: f"me/code--{value}" for key, value in config["auto_map"].items()}
    (base / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache),
                   "HF_MODULES_CACHE": str(tmp_path / "modules")}  # fmt: skip
    command = [sys.executable, "-c", EXPORT, base, tmp_path / "out"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert python_files(tmp_path / "out") == code
    assert fresh(tmp_path / "out", remote=True)[str(tmp_path / "out")]["info"] == {}


# 88

TEMPLATES = {
    "plain": CHATML_PLAIN,
    "odd": "{# café 你好 #}\r\n" + CHATML + "\n\n  ",
    "named": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CHATML_PLAIN}],
}


def templated_base(path: Path, stored: str | None, template: str | list) -> Path:
    """A base with the template in a file of its own, in the tokenizer's configuration (older ones), or without any."""
    base = tiny_folder("llama", path)
    (base / "chat_template.jinja").unlink()
    if stored == "jinja":
        (base / "chat_template.jinja").write_bytes(template.encode())
    if stored != "config":
        return base
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return base


def export_of(kind: str, base: Path, out: Path, **options) -> Path:
    chosen = {} if kind == "full" else {"method": method()}
    with Engine.from_pretrained(base, engine_config(), **chosen) as engine:
        engine.export(out, merge=kind == "merged", **options)
    return out


@pytest.mark.parametrize("kind", ["full", "adapter", "merged"])
@pytest.mark.parametrize(
    ("stored", "name"),
    [("jinja", "plain"), ("config", "plain"), ("jinja", "odd"), ("config", "odd"), ("config", "named")],
)
def test_88_the_bases_template_comes_back(kind, stored, name, tmp_path):
    """The template that the base has, wherever it is stored, is the export's to the last character, adapters' too.

    Not reported: line ends and blanks that a text file may lose, and a tokenizer with two templates.
    """
    base = templated_base(tmp_path / "base", stored, TEMPLATES[name])
    before = load_tokenizer(base).chat_template
    expected = TEMPLATES[name] if name != "named" else {each["name"]: each["template"] for each in TEMPLATES[name]}
    assert name == "odd" or before == expected
    with_tokenizer = export_of(kind, base, tmp_path / "with", tokenizer=load_tokenizer(base))
    without = export_of(kind, base, tmp_path / "without")
    for out in (with_tokenizer, without):
        assert load_tokenizer(out).chat_template == before, out.name


@pytest.mark.parametrize("kind", ["full", "adapter", "merged"])
@pytest.mark.parametrize("stored", ["jinja", "config", None])
def test_88_the_template_trained_with_comes_back(kind, stored, tmp_path):
    """Another template than the base's, chosen for training, replaces it in every kind of export."""
    chosen = TEMPLATES["odd"]
    base = templated_base(tmp_path / "base", stored, CHATML_PLAIN)
    assert load_tokenizer(base).chat_template == (CHATML_PLAIN if stored else None)
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = chosen
    outs = [export_of(kind, base, tmp_path / "set", tokenizer=tokenizer)]
    outs.append(export_of(kind, base, tmp_path / "given", tokenizer=load_tokenizer(base), chat_template=chosen))
    outs.append(export_of(kind, base, tmp_path / "alone", chat_template=chosen))
    for out in outs:
        assert load_tokenizer(out).chat_template == chosen, out.name


# 90


def test_90_everything_is_there_before_the_upload(server, tmp_path):  # noqa: F811
    """An export has its card, tokenizer and configuration before anything is sent, and all of them arrive."""
    base = tiny_folder("llama", tmp_path / "base")
    for kind in ("full", "adapter", "merged"):
        out = export_of(kind, base, tmp_path / kind, tokenizer=load_tokenizer(base))
        weights = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
        settings = "adapter_config.json" if kind == "adapter" else "config.json"
        assert {"README.md", weights, settings, "tokenizer.json", "chat_template.jinja"} <= visible(out).keys()
        server.committed.clear()
        push(out, "me/model")
        assert server.committed == visible(out)


@pytest.mark.parametrize("failing", ["put", "create", "commit", "gone"])
def test_90_a_failed_upload_is_a_failure(failing, server, folder, capsys, monkeypatch):  # noqa: F811
    """An upload that fails anywhere ends with status 1 and the command that continues it; nothing local changes.

    Not reported: a Hub that fails at the commit, after all files have arrived, and one that is gone.
    """
    before = visible(folder)
    if failing == "put":
        server.fail_puts = 1
    elif failing == "gone":
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        part = {"create": "/api/repos/create", "commit": "/commit/"}[failing]
        post = server.do_POST
        server.do_POST = lambda self: self.reply(400, {"error": "no"}) if part in self.path else post(self)
    assert main(["push", str(folder), "me/model"]) == 1
    # the Hub's client draws bars here: it was imported before the command could tell it not to
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("zft: ")]
    assert len(said) == 1 and said[0].endswith(f"continue with: zft push '{folder}' me/model")
    assert not server.committed and visible(folder) == before
    if failing == "put":  # one file's upload: the command that was named completes it
        push(folder, "me/model")
        assert server.committed == before
        return
    with pytest.raises(PushError):
        push(folder, "me/model")


def test_90_what_is_not_complete_is_not_sent(server, folder, tmp_path):  # noqa: F811
    """A folder that lacks a shard, a run without an export and an empty folder are refused before the first request."""
    shard = next(folder.glob("*.safetensors"))
    shard.unlink()
    (tmp_path / "empty").mkdir()
    for bad in (folder, tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(ZftError):
            push(bad, "me/model")
        assert main(["push", str(bad), "me/model"]) == 2
    assert not server.created and not server.committed
