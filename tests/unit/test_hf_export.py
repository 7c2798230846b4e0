"""Exports against from_pretrained, save_pretrained and deliberate damage."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.tiny import ARCHS, CHATML, tiny_folder, tiny_model
from zft.checkpoint import hf
from zft.checkpoint.hf import Exporter, ExportError, ExportOptions, export_folder, verify_export
from zft.config import ZftError
from zft.models.load import build_model, grow


def trained(arch: str, seed: int = 7, **overrides) -> torch.nn.Module:
    """Float32 weights that differ from the base's."""
    return tiny_model(arch, seed=seed, **overrides)


def units(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The model's weights as an engine streams them: one layer at a time, the rest last, tied once."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    persistent = model.state_dict()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in persistent:
            number = next((part for part in name.split(".") if part.isdigit()), "rest")
            groups.setdefault(number, {})[name] = tensor.detach()
    return iter(groups.values())


def quiet_load(folder: Path, **options):
    return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)


def clean(info: dict) -> bool:
    return not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_export_equals_save_pretrained(arch: str, tmp_path: Path) -> None:
    base = tiny_folder(arch, tmp_path / "base")
    values = trained(arch)
    report = export_folder(tmp_path / "out", units(values), build_model(base), base)

    want = AutoModelForCausalLM.from_pretrained(base)
    want.load_state_dict(values.state_dict())
    want.save_pretrained(tmp_path / "want")
    got, expected = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "want/model.safetensors")
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name

    loaded, info = quiet_load(tmp_path / "out")
    assert clean(info), info
    ids = torch.arange(3, 20)[None]
    assert torch.equal(loaded(ids).logits, want.eval()(ids).logits)
    assert report.total_bytes == sum(t.numel() * t.itemsize for t in got.values())
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "qwen3_moe", "gpt2"])
def test_sharded_export(arch: str, tmp_path: Path) -> None:
    base = tiny_folder(arch, tmp_path / "base")
    values = trained(arch)
    report = export_folder(tmp_path / "out", units(values), build_model(base), base, max_shard_size="16KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {each.name for each in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 2 and set(index["weight_map"].values()) == files
    found = {}
    for name in files:
        part = load_file(tmp_path / "out" / name)
        assert not part.keys() & found.keys()
        found |= part
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in found.values()) == report.total_bytes
    loaded, info = quiet_load(tmp_path / "out")
    assert clean(info)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, values.state_dict()[name].to(parameter.dtype)), name


@pytest.mark.parametrize("arch", ["llama_tied", "gemma2", "gpt2", "opt", "falcon", "granite"])
def test_tied_weights_are_stored_once_under_the_source_name(arch: str, tmp_path: Path) -> None:
    base = tiny_folder(arch, tmp_path / "base")
    values = trained(arch)
    # an engine may hand the tied weight out under the head's name, and more than once
    head = next(n for n, p in values.named_parameters(remove_duplicate=False) if "lm_head" in n)
    embedding = next(n for n, p in values.named_parameters() if p is values.get_input_embeddings().weight)
    stream = [{head: values.state_dict()[head]}, *units(values)]
    export_folder(tmp_path / "out", iter(stream), build_model(base), base)
    got = load_file(tmp_path / "out/model.safetensors")
    assert head not in got and embedding in got
    loaded, info = quiet_load(tmp_path / "out")
    assert clean(info) and loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("dtype", "text"), [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")]
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_of_tensors_and_config_agree(dtype: torch.dtype, text: str, key: str, tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config[key] = config.pop("dtype")
    (base / "config.json").write_text(json.dumps(config))
    values = trained("llama")
    report = export_folder(tmp_path / "out", units(values), build_model(base), base, dtype=dtype)
    got = load_file(tmp_path / "out/model.safetensors")
    assert {t.dtype for t in got.values()} == {dtype} and report.dtype == dtype
    stated = json.loads((tmp_path / "out/config.json").read_text())
    assert stated[key] == text and len({"dtype", "torch_dtype"} & stated.keys()) == 1
    for name, tensor in got.items():
        assert torch.equal(tensor, values.state_dict()[name].to(dtype)), "one rounding from float32, to nearest even"


def test_the_dtype_is_the_bases_even_if_the_model_was_built_in_another(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base", dtype=torch.float32)
    report = export_folder(tmp_path / "out", units(trained("llama")), build_model(base, dtype=torch.bfloat16), base)
    got = load_file(tmp_path / "out/model.safetensors")
    assert report.dtype == torch.float32 and {t.dtype for t in got.values()} == {torch.float32}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"


def test_sub_configs_agree_on_the_dtype(tmp_path: Path) -> None:
    from zft.checkpoint.sidecar import _replace_dtype

    raw = {"dtype": "float32", "text_config": {"torch_dtype": "float32", "inner": {"dtype": None}}, "n": 1}
    _replace_dtype(raw, "bfloat16")
    assert raw == {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "inner": {"dtype": "bfloat16"}},
        "n": 1,
    }


def test_config_is_the_bases_word_for_word(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    old = json.loads((base / "config.json").read_text())
    theta = old.pop("rope_parameters")["rope_theta"]
    old |= {"rope_theta": theta, "rope_scaling": None, "transformers_version": "4.40.0", "custom_note": {"a": [1, 2]}}
    (base / "config.json").write_text(json.dumps(old))
    export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base)
    assert json.loads((tmp_path / "out/config.json").read_text()) == old


def test_grown_vocabulary_is_exported(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    model = build_model(base)
    grow(model, 67)
    values = trained("llama", vocab_size=67)
    export_folder(tmp_path / "out", units(values), model, base)
    loaded, info = quiet_load(tmp_path / "out")
    assert clean(info) and loaded.config.vocab_size == 67 and loaded.lm_head.weight.shape == (67, 32)


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    before = os.umask(0o027)
    try:
        export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base, max_shard_size="30KB")
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o640}, modes
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_a_non_empty_target_is_refused_and_untouched(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(ZftError, match="not empty"):
        export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base)
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    export_folder(tmp_path / "empty", units(trained("llama")), build_model(base), base)


@pytest.mark.parametrize("size", ["5XB", "big", ""])
def test_a_shard_size_that_is_none(size: str, tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    with pytest.raises(ZftError, match="max_shard_size is like 5GB"):
        export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base, max_shard_size=size)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["base"]


def test_nothing_appears_when_the_stream_breaks(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")

    def broken() -> Iterator[dict]:
        yield next(units(trained("llama")))
        raise RuntimeError("NVMe read failed")

    with pytest.raises(RuntimeError, match="NVMe"):
        export_folder(tmp_path / "out", broken(), build_model(base), base)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["base"]


def test_what_a_killed_export_left_is_removed_but_a_running_one_is_not(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    (tmp_path / ".tmp-out-dead").mkdir()
    (tmp_path / ".tmp-out-dead/model.safetensors").write_bytes(b"half")
    running = Exporter(tmp_path / "out", build_model(base), base, ExportOptions())
    assert not (tmp_path / ".tmp-out-dead").exists()
    export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base)
    assert running._work.path.exists()
    running.abort()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["base", "out"]


def test_missing_and_unknown_weights_fail_the_export(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    few = [u for u in units(trained("llama"))][:-1]
    with pytest.raises(ExportError, match="weights were never given"):
        export_folder(tmp_path / "out", iter(few), build_model(base), base)
    with pytest.raises(ExportError, match="lora_A is not a weight"):
        export_folder(tmp_path / "out", iter([{"lora_A": torch.zeros(1)}]), build_model(base), base)
    assert not (tmp_path / "out").exists()


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def drop(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def extra(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"x": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})


def stray(folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")


def lie(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


def widen(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(33, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip, "does not hold the bytes"),
        (drop, "model.norm.weight"),
        (extra, "x in model.safetensors"),
        (stray, "on disk"),
        (lie, "config.json states torch.float32"),
        (widen, r"norm\.weight"),
    ],
)
def test_verification_fails_the_export_and_says_why(
    damage, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    inner = hf.verify_export
    monkeypatch.setattr(hf, "verify_export", lambda folder, *a, **k: (damage(folder), inner(folder, *a, **k)))
    with pytest.raises(ExportError, match=says):
        export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [drop, extra, stray, lie, widen])
def test_verification_finds_damage_without_the_writers_plan(damage, tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base)
    assert verify_export(tmp_path / "out", base) == 21
    damage(tmp_path / "out")
    with pytest.raises(ExportError):
        verify_export(tmp_path / "out", base)


def test_verification_compares_with_the_base(tmp_path: Path) -> None:
    base, other = (
        tiny_folder("llama", tmp_path / "base"),
        tiny_folder("llama", tmp_path / "other", intermediate_size=40),
    )
    export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base)
    with pytest.raises(ExportError, match="in the base"):
        verify_export(tmp_path / "out", other)


@pytest.mark.parametrize("settings", [{"do_sample": False, "temperature": 0.9}, {"temperature": 0.6, "top_p": 0.9}])
def test_an_invalid_generation_config_is_repaired(settings: dict, tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "max_length": 77} | settings))
    report = export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base)
    assert len(report.warnings) == 1 and f"temperature={settings['temperature']}" in report.warnings[0]
    saved = GenerationConfig.from_pretrained(tmp_path / "out")
    saved.validate(strict=True)
    saved.save_pretrained(tmp_path / "again")
    assert saved.eos_token_id == [2, 3] and saved.max_length == 77 and not saved.do_sample


def test_a_valid_generation_config_is_copied(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    text = '{"do_sample": true, "temperature": 0.6, "eos_token_id": [2, 3], "note": 1}'
    (base / "generation_config.json").write_text(text)
    report = export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base)
    assert (tmp_path / "out/generation_config.json").read_text() == text and not report.warnings


@pytest.mark.parametrize("template", [CHATML, "{% for m in messages %}{{ m.content }}{% endfor %}", None])
def test_the_chat_template_trained_with_is_kept(template: str | None, tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    want = template if template is not None else tokenizer.chat_template
    for name, given in (("with", tokenizer), ("without", None)):
        out = tmp_path / name
        export_folder(out, units(trained("llama")), build_model(base), base, tokenizer=given, chat_template=template)
        assert AutoTokenizer.from_pretrained(out).chat_template == want
    assert AutoTokenizer.from_pretrained(tmp_path / "with").get_vocab() == tokenizer.get_vocab()


def test_model_card(tmp_path: Path) -> None:
    from huggingface_hub.repocard import metadata_load

    base = tiny_folder("llama", tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: llama3.1\nlanguage:\n- en\n---\n# Base\n")
    facts = {
        "base_model": "org/tiny-llama",
        "datasets": ["org/chats", "/home/me/secret/private.jsonl"],
        "steps": 120,
        "learning_rate": 1e-5,
        "note": "a | b",
    }
    export_folder(tmp_path / "out", units(trained("llama")), build_model(base), base, facts=facts)
    data = metadata_load(tmp_path / "out/README.md")
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-generation"
    assert data["base_model"] == "org/tiny-llama" and data["datasets"] == ["org/chats"]
    assert data["license"] == "llama3.1" and data["language"] == ["en"]
    text = (tmp_path / "out/README.md").read_text()
    assert "| steps | 120 |" in text and "a \\| b" in text and "/home/me" not in text

    export_folder(tmp_path / "local", units(trained("llama")), build_model(base), base, facts={"base_model": str(base)})
    data = metadata_load(tmp_path / "local/README.md")
    assert "base_model" not in data and str(tmp_path) not in (tmp_path / "local/README.md").read_text()


def test_header_is_what_safetensors_writes(tmp_path: Path) -> None:
    base = tiny_folder("deepseek_v3", tmp_path / "base")
    export_folder(tmp_path / "out", units(trained("deepseek_v3")), build_model(base), base)
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_slice(k).get_dtype() for k in file.keys()} == {"BF16", "F32"}  # noqa: SIM118


def test_export_without_a_base(tmp_path: Path) -> None:
    values = trained("qwen2")
    export_folder(tmp_path / "out", units(values), values, None, dtype=torch.bfloat16)
    loaded, info = quiet_load(tmp_path / "out")
    assert clean(info) and loaded.dtype == torch.bfloat16


def test_a_full_disk_is_found_before_anything_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_folder("llama", tmp_path / "base")

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    seen = []
    with pytest.raises(OSError, match="No space left"):
        export_folder(tmp_path / "out", (seen.append(u) or u for u in units(trained("llama"))), build_model(base), base)
    assert not seen and sorted(each.name for each in tmp_path.iterdir()) == ["base"]
