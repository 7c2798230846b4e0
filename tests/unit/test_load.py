"""Building on meta and streaming weights, against from_pretrained, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import ARCHS, tiny_folder, tiny_model, tiny_tokenizer
from zft.config import ZftError
from zft.models.load import HubWeights, build_model, check_tokens, grow, load_config, load_tokenizer, tokenizer_rows
from zft.models.weights import grow_rows


def names_of(model: torch.nn.Module) -> list[str]:
    persistent = set(model.state_dict())
    return [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers() if n in persistent]


def units_of(model: torch.nn.Module) -> list[list[str]]:
    """One list for each decoder layer and one for each other module, roughly what the engine asks for."""
    groups: dict[str, list[str]] = {}
    for name in names_of(model):
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        groups.setdefault(".".join(parts[: at + 1] if at is not None else parts[:-1]), []).append(name)
    return list(groups.values())


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_streamed_weights_and_buffers_equal_from_pretrained(arch: str, tmp_path: Path) -> None:
    folder = tiny_folder(arch, tmp_path, max_shard_size="30KB")
    reference = AutoModelForCausalLM.from_pretrained(folder)
    model = build_model(folder)
    weights = HubWeights(folder, model)
    got = {name: tensor for unit in units_of(model) for name, tensor in weights.read(unit)}

    assert weights.unexpected == []
    assert all(p.device.type == "meta" for p in model.parameters()) and model.training
    want = dict(reference.named_parameters())
    assert list(dict(model.named_parameters())) == list(want), (
        "tied parameters must be one Parameter, as in the reference"
    )
    for name, parameter in model.named_parameters():
        assert parameter.dtype == want[name].dtype, name
        assert torch.equal(got[name].to(parameter.dtype), want[name].data), name
    ours, theirs = dict(model.named_buffers()), dict(reference.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        value = got[name].to(ours[name].dtype) if name in got else ours[name]
        assert value.dtype == buffer.dtype and torch.equal(value, buffer), name


def test_rope_scaling_is_in_the_buffers(tmp_path: Path) -> None:
    plain, scaled = (build_model(tiny_folder(a, tmp_path / a)) for a in ("llama", "llama3_rope"))
    a, b = plain.model.rotary_emb.inv_freq, scaled.model.rotary_emb.inv_freq
    assert a.device.type == "cpu" and a.dtype == torch.float32 and not torch.equal(a, b)


def test_tied_weights_are_one_parameter_and_found_under_either_name(tmp_path: Path) -> None:
    folder = tiny_folder("llama_tied", tmp_path)
    model = build_model(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = HubWeights(folder, model)
    (_, a), (_, b) = *weights.read(["lm_head.weight"]), *weights.read(["model.embed_tokens.weight"])
    assert torch.equal(a, b)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_head_stored_alone_is_found(tmp_path: Path) -> None:
    folder = tiny_folder("llama_tied", tmp_path)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    model = build_model(folder)
    assert len(list(HubWeights(folder, model).read(["model.embed_tokens.weight"]))) == 1


@pytest.mark.parametrize("same", [True, False])
def test_a_config_that_ties_two_stored_weights(same: bool, tmp_path: Path) -> None:
    folder = tiny_folder("llama_tied", tmp_path)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + (0 if same else 1)}))
    reference = AutoModelForCausalLM.from_pretrained(folder)
    model = build_model(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == same
    got = dict(HubWeights(folder, model).read(names_of(model)))
    for name, parameter in reference.named_parameters():
        assert torch.equal(got[name], parameter.data), name


def test_a_checkpoint_without_the_base_prefix(tmp_path: Path) -> None:
    folder = tiny_folder("gpt2", tmp_path)

    def strip(tensors: dict) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    rewrite(folder, strip)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    model = build_model(folder)
    weights = HubWeights(folder, model)
    got = dict(weights.read(names_of(model)))
    assert all(torch.equal(got[name], p.data) for name, p in reference.named_parameters())


def test_float32_masters_in_the_folder_are_yielded_unrounded(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    model = build_model(folder)
    weights = HubWeights(folder, model)
    ((_, tensor),) = weights.read(["lm_head.weight"])
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert tensor.dtype == torch.float32 == weights.dtype("lm_head.weight")
    assert torch.equal(tensor, load_file(folder / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_a_unit_holds_one_fused_tensor_at_a_time(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zft.models import tensorfile

    folder = tiny_folder(arch, tmp_path)
    model = build_model(folder)
    weights, reads = HubWeights(folder, model), []
    inner = tensorfile.TensorFile.read
    monkeypatch.setattr(tensorfile.TensorFile, "read", lambda self, name: reads.append(name) or inner(self, name))
    unit = [n for n in names_of(model) if ".layers.1." in n]
    for name, _ in weights.read(unit):
        assert all(".layers.1." in read for read in reads), "only this unit's tensors are read"
        if name.endswith("experts.down_proj"):
            assert len(reads) == 4
        reads.clear()


def test_missing_and_mismatched_weights_are_named(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ZftError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        HubWeights(folder, build_model(folder))
    rewrite(folder, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 32)}))
    model = build_model(folder)
    with pytest.raises(ZftError, match=r"up_proj\.weight has shape \[3, 32\] where config\.json asks for \[48, 32\]"):
        list(HubWeights(folder, model).read(["model.layers.1.mlp.up_proj.weight"]))


def test_unexpected_weights_are_listed(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    rewrite(folder, lambda t: t.update({"vision.weight": torch.zeros(2), "model.rotary_emb.inv_freq": torch.zeros(4)}))
    assert HubWeights(folder, build_model(folder)).unexpected == ["vision.weight"]


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/etc/passwd.safetensors", "a/../../b.safetensors", "x.bin"]
)
def test_an_index_may_not_point_outside_its_folder(target: str, tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path / "m", max_shard_size="30KB")
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = target
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ZftError, match="refused"):
        build_model(folder)


def test_a_deleted_shard_and_a_stale_index_are_named(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path, max_shard_size="30KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["lm_head.weight"]
    index["weight_map"]["ghost"] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ZftError, match="lacks tensor ghost"):
        HubWeights(folder, build_model(folder))
    (folder / shard).unlink()
    with pytest.raises(ZftError, match=f"lacks {shard}"):
        build_model(folder)


@pytest.mark.parametrize("damage", ["truncate", "extend", "header", "empty"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {"truncate": data[:-7], "extend": data + b"x", "header": data[:9] + b"\xff" + data[10:], "empty": b""}[damage]
    )
    with pytest.raises(ZftError, match=r"model\.safetensors .*again"):
        HubWeights(folder, build_model(folder))


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickle_weights_are_refused_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder("llama", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ZftError, match=r"pytorch_model\.bin, a pickle"):
        build_model(folder)
    monkeypatch.setenv("ZFT_ALLOW_PICKLE", "1")
    model = build_model(folder)
    got = dict(HubWeights(folder, model).read(names_of(model)))
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    torch.save(tensors | {"x": Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ZftError, match="holds more than tensors"):
        HubWeights(folder, model)
    assert not (tmp_path / "ran").exists()


def test_quantized_and_missing_configs_are_refused(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(ZftError, match="quantized with gptq"):
        load_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ZftError, match="no config.json"):
        load_config(folder)


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "gpt2", "gemma3n"])
def test_growing_keeps_old_rows_and_adds_their_mean(arch: str, tmp_path: Path) -> None:
    folder = tiny_folder(arch, tmp_path)
    before = dict(HubWeights(folder, m := build_model(folder)).read(names_of(m)))
    model = build_model(folder)
    assert grow(model, 67) and not grow(model, 60)
    assert model.config.get_text_config().vocab_size == 67
    assert model.get_input_embeddings().weight.shape[0] == model.get_output_embeddings().weight.shape[0] == 67
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == m.config.tie_word_embeddings
    after = dict(HubWeights(folder, model).read(names_of(model)))
    grown = [name for name in after if after[name].shape != before[name].shape]
    assert len(grown) == {"llama": 2, "gemma3n": 2}.get(arch, 1), "gemma3n has per-layer embeddings too"
    for name, old in before.items():
        assert torch.equal(after[name][: len(old)], old), name
        if name in grown:
            mean = old.float().mean(dim=0).to(old.dtype)
            for row in after[name][len(old) :]:
                torch.testing.assert_close(row, mean)
            assert torch.equal(after[name][64], after[name][66])


def test_grow_rows_of_a_bias() -> None:
    assert grow_rows(torch.tensor([1.0, 3.0]), 4).tolist() == [1.0, 3.0, 2.0, 2.0]


def test_tokens_beyond_the_embedding_are_found_before_a_batch_needs_them(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    model, tokenizer = build_model(folder), load_tokenizer(folder)
    check_tokens(model, tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer_rows(tokenizer) == 65
    with pytest.raises(ZftError, match=r"token '\[PAD\]' has id 64 but the model has 64 rows"):
        check_tokens(model, tokenizer)
    grow(model, tokenizer_rows(tokenizer))
    check_tokens(model, tokenizer)


def test_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    for name in os.listdir(folder):
        if name.startswith(("tokenizer", "chat")):
            (folder / name).unlink()
    with pytest.raises(ZftError, match="no usable tokenizer") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_keep_in_fp32_is_respected(tmp_path: Path) -> None:
    folder = tiny_folder("deepseek_v3", tmp_path)
    model, reference = build_model(folder), AutoModelForCausalLM.from_pretrained(folder)
    kept = {name for name, t in reference.state_dict().items() if t.dtype == torch.float32}
    assert kept and kept == {name for name, t in model.state_dict().items() if t.dtype == torch.float32}


def test_the_built_model_computes_what_the_reference_computes(tmp_path: Path) -> None:
    folder = tiny_folder("gemma3", tmp_path)
    model = build_model(folder).eval()
    state = dict(HubWeights(folder, model).read(names_of(model)))
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights(recompute_mapping=False)
    ids = torch.arange(3, 20)[None]
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model(ids).logits, reference(ids).logits)


def test_tokenizer_of_the_tests_spells_what_it_reads() -> None:
    tokenizer = tiny_tokenizer(128)
    text = "<|im_start|>user\nHi, what?<|im_end|>\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tiny_model("llama").config.vocab_size == 64
