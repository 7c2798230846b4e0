"""Cases d: LoRA. The reference is PEFT itself, or the same run without what the case adds."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.adapters import (
    base_folder,
    batches,
    difference,
    engine_config,
    gradients,
    method,
    peft_model,
    random_adapter,
)
from tests.harness import run_ranks
from tests.tiny import tiny_model
from zft.api import Engine
from zft.checkpoint.adapter import export_adapter
from zft.checkpoint.source import StoredWeights
from zft.config import ZftError
from zft.models.adapters import attach_adapter
from zft.models.load import HubWeights, build_model

QV = {"targets": ("q_proj", "v_proj")}
ADAPTER = "adapter_model.safetensors"
BASE = "base_model.model.model.layers."


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def share(micro_batches: list[dict]) -> list[dict]:
    return micro_batches[rank() :: int(os.environ.get("WORLD_SIZE", 1))]


def attached(base: Path, options, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = build_model(base, dtype)
    return attach_adapter(model, HubWeights(base, model), options, 3)


# 22: what is saved


def saves(base: str, folder: str, options: dict, settings: dict) -> None:
    """On each rank: a step, a checkpoint, the adapter exported from the engine and (rank 0) from the checkpoint."""
    config = engine_config(nvme_dir=f"{folder}/tiers", timeout_s=60.0, **settings)
    with Engine.from_pretrained(base, config, method=method(**options)) as engine:
        engine.step(batches(1) if rank() == 0 else [])
        engine.save(f"{folder}/checkpoint")
        engine.export(f"{folder}/final")
    if rank() == 0:
        model, _ = attached(Path(base), method(**options))
        stored = StoredWeights(Path(folder) / "checkpoint")
        export_adapter(f"{folder}/early", stored.units(torch.float32), model, base)
        stored.close()


@pytest.mark.parametrize(
    ("size", "options", "count", "settings"),
    [
        (1, QV, 8, {}),
        (2, QV, 8, {}),
        (3, QV, 8, {}),
        (2, {"targets": ("all-linear", "lm_head")}, 30, {}),
        (3, QV, 8, {"stage": 2, "param_tier": "nvme", "state_tier": "nvme", "grad_tier": "cpu"}),
    ],
    ids=str,
)
def test_22_adapter_is_saved_whole(size, options, count, settings, tmp_path):
    """The adapter has all its tensors in full shape under PEFT's names, B trained, in a checkpoint and in the export alike."""
    base = base_folder("llama", tmp_path / "base")
    run_ranks(size, saves, str(base), str(tmp_path), options, settings)
    final, early = load_file(tmp_path / "final" / ADAPTER), load_file(tmp_path / "early" / ADAPTER)
    assert len(final) == count and final.keys() == early.keys()
    assert all(torch.equal(early[key], tensor) and tensor.any() for key, tensor in final.items())
    assert all(
        key.startswith("base_model.model.") and key.endswith((".lora_A.weight", ".lora_B.weight")) for key in final
    )
    for layer in (0, 1):
        for target, rows in (("q_proj", 32), ("v_proj", 16)):  # two of four heads for keys and values
            assert final[f"{BASE}{layer}.self_attn.{target}.lora_A.weight"].shape == (4, 32)
            assert final[f"{BASE}{layer}.self_attn.{target}.lora_B.weight"].shape == (rows, 4)


# 23: modules_to_save, raw parameters


def first_and_trained(base: str, options: dict) -> dict[str, Any]:
    """On each rank: all weights before and after a step, and which share of the trained ones this rank holds."""
    with Engine.from_pretrained(base, engine_config(timeout_s=60.0), method=method(**options)) as engine:
        first = {name: tensor.numpy() for name, tensor in engine.named_parameters()}
        held = {
            span.name: (record.ranges.hi_numel, group.layout.padded_numel)
            for group, record in engine.parts.records.items() if group.trainable for span in group.layout.spans
        }  # fmt: skip
        engine.step(share(batches(3)))
        return {"first": first, "after": {n: t.numpy() for n, t in engine.named_parameters()}, "held": held}


@pytest.mark.parametrize(
    ("size", "saved"), [(1, "lm_head"), (2, "lm_head"), (3, "lm_head"), (2, "model.embed_tokens"), (3, "model.norm")]
)
def test_23_module_to_save_is_a_full_sharded_copy(size, saved, tmp_path):
    """A copy under modules_to_save has the base's full values at step 0, is sharded over the ranks and alone is trained."""
    base = base_folder("llama", tmp_path / "base")
    copy, original = (
        f"base_model.model.{saved}.{kind}.weight" for kind in ("modules_to_save.default", "original_module")
    )
    for found in run_ranks(size, first_and_trained, str(base), {"modules_to_save": (saved,), "targets": ("q_proj",)}):
        value = tiny_model("llama").get_parameter(f"{saved}.weight").detach().numpy()
        assert (found["first"][copy] == value).all() and found["first"][copy].shape == value.shape
        assert (found["after"][copy] != value).any() and (found["after"][original] == value).all()
        held, whole = found["held"][copy]
        assert held * size == whole or (saved == "model.norm" and held == whole), "small leftovers stay whole"


@pytest.mark.parametrize(("size", "arch"), [(2, "mixtral"), (3, "qwen3_moe")])
def test_23_raw_parameter_has_its_full_shape(size, arch, tmp_path):
    """LoRA on fused experts, which are parameters and no modules, sees the full shape though they are sharded."""
    base = base_folder(arch, tmp_path / "base")
    options = {"targets": ("experts.down_proj",)}
    found = run_ranks(size, first_and_trained, str(base), options)[0]
    [alone] = run_ranks(1, first_and_trained, str(base), options)
    for name, value in alone["first"].items():
        assert (found["first"][name] == value).all(), name
        assert abs(found["after"][name] - alone["after"][name]).max() <= 1e-6, name
    assert (
        sum("lora_" in name and bool((found["after"][name] != value).any()) for name, value in found["first"].items())
        >= 2
    )


# 24: prefixes


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_24_prefixed_keys_are_an_error(prefix, name, tmp_path):
    """An adapter none of whose keys fit is refused by the name of a key, however its prefix came about."""
    base = base_folder("llama", tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "adapter", method(name, **QV))
    tensors = {
        key.replace("model.layers", f"{prefix}model.layers"): t for key, t in load_file(adapter / ADAPTER).items()
    }
    save_file(tensors, adapter / ADAPTER, metadata={"format": "pt"})
    with pytest.raises(ZftError, match=f"doesn't fit this model.*({prefix}|is missing).*and .* more"):
        attached(base, method(name, adapter=str(adapter)))


@pytest.mark.parametrize("name", ["lora", "dora", "rslora"])
def test_24_keys_are_those_that_peft_looks_for(name, tmp_path):
    """PEFT loads an export with 0 missing and 0 unexpected keys, from the engine and from an intermediate checkpoint."""
    base = base_folder("llama", tmp_path / "base")
    with Engine.from_pretrained(base, engine_config(), method=method(name)) as engine:
        engine.step(batches(2))
        engine.export(tmp_path / "adapter")
        engine.save(tmp_path / "checkpoint")
    model, _ = attached(base, method(name))
    stored = StoredWeights(tmp_path / "checkpoint")
    export_adapter(tmp_path / "early", stored.units(torch.float32), model, base)
    for folder in ("adapter", "early"):
        loaded = peft_model(base, tmp_path / folder)
        again = loaded.load_adapter(tmp_path / folder, "again")
        assert not again.unexpected_keys and not [key for key in again.missing_keys if ".again." in key]


def partly(model):
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel, partly])
@pytest.mark.parametrize("arch", ["llama", "llama_tied"])
def test_24_wrapped_model_is_refused(wrap, arch):
    """A model that is already wrapped (torch.compile, DataParallel) is refused, so that no prefix can reach a key."""
    with pytest.raises(ZftError, match="wrapped.*pass the model itself"):
        Engine(wrap(tiny_model(arch)), engine_config())


# 25: dtype of a merged model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_25_merged_model_has_the_bases_dtype(dtype, precision, tmp_path):
    """A merged export has the base's dtype whatever the run computed in; its config agrees and its bytes are the base's."""
    base = base_folder("llama", tmp_path / "base", dtype=dtype)
    with Engine.from_pretrained(base, engine_config(precision=precision), method=method()) as engine:
        engine.step(batches(1))
        engine.export(tmp_path / "merged", merge=True)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {dtype} and before.keys() == after.keys()
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert sum(t.nbytes for t in after.values()) == sum(t.nbytes for t in before.values())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == dtype


# 27, 28: recomputing a frozen base


def step_gradients(base: str, adapter: str, settings: dict) -> tuple[float, dict]:
    config = engine_config(timeout_s=60.0, **settings)
    with Engine.from_pretrained(base, config, method=method(adapter=adapter)) as engine:
        loss = engine.step(share(batches(3))).loss
        return loss, gradients(engine)


@pytest.mark.parametrize("reentrant", [True, False, None])
@pytest.mark.parametrize("activation", ["full", "none", "selective"])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_27_checkpointing_over_a_frozen_base(arch, activation, reentrant, tmp_path):
    """Adapters under a frozen base get the same gradients with recomputing on and off.

    So they do when the model's own checkpointing was switched on, reentrant or not.
    """
    base = base_folder(arch, tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "adapter", method())
    expected = step_gradients(str(base), str(adapter), {"activation": "none"})
    model, source = attached(base, method(adapter=str(adapter)))
    if reentrant is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with Engine(model, engine_config(activation=activation), source) as engine:
        loss = engine.step(batches(3)).loss
        found = gradients(engine)
    assert abs(loss - expected[0]) <= 1e-6 and difference(found, expected[1]) <= 1e-6
    assert found.keys() == expected[1].keys() and all(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("arch", ["llama", "llama_qknorm", "olmo2"])
def test_28_recompute_sees_frozen_norms(arch, size, tmp_path):
    """With sharded parameters the recompute sees every frozen norm in full: loss and gradients as without recomputing."""
    base = base_folder(arch, tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "adapter", method())
    [(loss, grads)] = run_ranks(1, step_gradients, str(base), str(adapter), {"activation": "none"})
    for activation in ("full", "offload") if size == 2 else ("full",):
        for found in run_ranks(size, step_gradients, str(base), str(adapter), {"activation": activation}):
            assert abs(found[0] - loss) <= 1e-6 and difference(found[1], grads) <= 1e-6


# 29: resume


def resumed(base: str, folder: str, name: str, options: dict) -> tuple[list, list, bool]:
    """On each rank: losses of four steps, and those of two, a checkpoint, and two in a new engine; were tensors equal?"""
    start = dict(method=method(name, **options))
    with Engine.from_pretrained(base, engine_config(timeout_s=60.0), **start) as engine:
        whole = [engine.step(share(batches(3, seed=seed))).loss for seed in range(4)]
    with Engine.from_pretrained(base, engine_config(timeout_s=60.0), **start) as engine:
        parts = [engine.step(share(batches(3, seed=seed))).loss for seed in range(2)]
        engine.save(folder)
        saved = dict(engine.named_parameters())
    with Engine.from_pretrained(base, engine_config(timeout_s=60.0), **start) as engine:
        fresh = dict(engine.named_parameters())
        engine.load(folder)
        now = dict(engine.named_parameters())
        same = all(torch.equal(now[key], tensor) for key, tensor in saved.items()) and now.keys() == saved.keys()
        same = same and any(not torch.equal(fresh[key], tensor) for key, tensor in saved.items())
        parts += [engine.step(share(batches(3, seed=seed))).loss for seed in range(2, 4)]
    return whole, parts, same


@pytest.mark.parametrize(
    ("size", "name", "options"),
    [(1, "lora", {}), (2, "lora", QV), (3, "lora", QV), (1, "dora", {}), (2, "qlora", {}),
     (2, "rslora", {"modules_to_save": ("lm_head",), "targets": ("q_proj",)})],
    ids=str,
)  # fmt: skip
def test_29_resumed_adapter_is_the_saved_one(size, name, options, tmp_path):
    """A resumed adapter is bitwise what was saved, and its losses are those of the uninterrupted run."""
    base = base_folder("llama", tmp_path / "base")
    for whole, parts, same in run_ranks(size, resumed, str(base), str(tmp_path / "checkpoint"), name, options):
        assert same and parts == whole


def test_29_checkpoint_of_another_adapter_is_refused(tmp_path):
    """A checkpoint is never half used: one of an adapter with other targets, or of no adapter, is refused by name."""
    base = base_folder("llama", tmp_path / "base")
    with Engine.from_pretrained(base, engine_config(), method=method(**QV)) as engine:
        engine.save(tmp_path / "checkpoint")
    for options in ({"method": method()}, {"method": method("dora", **QV)}, {}):
        with Engine.from_pretrained(base, engine_config(), **options) as engine:
            before = dict(engine.named_parameters())
            with pytest.raises(ZftError, match="lora_|differ|no tensor|q_proj"):
                engine.load(tmp_path / "checkpoint")
            assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_parameters())


# 30: targets


@pytest.mark.parametrize(
    ("arch", "count"), [("llama", 14), ("llama_tied", 14), ("gpt2", 8), ("gpt_neox", 8), ("phi3", 8)]
)
def test_30_all_linear_leaves_the_head_out(arch, count, tmp_path):
    """all-linear is every linear layer by its full name, without the output head, whatever its name is."""
    model, _ = attached(base_folder(arch, tmp_path / "base"), method())
    names = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == count and not any(name.endswith(("lm_head", "embed_out")) for name in names)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (
            ("embed_tokens", "q_proj"),
            {"model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"},
        ),
        (("lm_head",), {"lm_head"}),
        (("layers.1.mlp.up_proj",), {"model.layers.1.mlp.up_proj"}),
        ((r"model\.layers\.0\..*(gate|up)_proj",), {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}),
    ],
    ids=["several", "head", "suffix", "pattern"],
)
def test_30_named_targets_are_exactly_hit(targets, expected, tmp_path):
    """What is named gets an adapter, embedding and head too, by whole parts of its full name, and nothing else does."""
    model, _ = attached(base_folder("llama", tmp_path / "base"), method(targets=targets))
    names = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert {name.removeprefix("base_model.model.") for name in names} == expected


@pytest.mark.parametrize(
    "targets", [("q_proj", "c_attn"), ("proj",), ("mlp",), (r".*\.wq",), ("layers.2.mlp.up_proj",)]
)
def test_30_unmatched_target_is_an_error(targets, tmp_path):
    """A target that matches nothing is an error with the list of what could be meant."""
    with pytest.raises(ZftError, match="matches nothing.*all-linear, embed_tokens, q_proj, k_proj.*lm_head"):
        attached(base_folder("llama", tmp_path / "base"), method(targets=targets))


# 31: two dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_31_adapter_has_float32_masters_beside_any_base(dtype, precision, tmp_path):
    """Adapter and frozen base lie in groups of their own by dtype and use; the adapter's masters are float32."""
    base = base_folder("llama", tmp_path / "base", dtype=dtype)
    with Engine.from_pretrained(base, engine_config(precision=precision), method=method()) as engine:
        for group, record in engine.parts.records.items():
            is_adapter = {"lora_" in span.name for span in group.layout.spans}
            assert is_adapter == {group.trainable}
            master = {"bf16": {"hi", "lo"}, "fp16": {"hi", "master"}, "fp32": {"hi"}}[precision]
            assert record.slabs.keys() == (master | {"m", "v", "grad"} if group.trainable else {"hi"})
        before = {name: tensor for name, tensor in engine.named_parameters() if "lora_A" in name}
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in before.values())
        assert engine.step(batches(2), lr=1e-5).loss > 0
        engine.step(batches(2), lr=1e-5)
        after = dict(engine.named_parameters())
        assert all(not torch.equal(after[name], tensor) for name, tensor in before.items()), "steps of 1e-5 are kept"


# 32: first values


def first_values(base: str, name: str, options: dict, settings: dict) -> dict:
    with Engine.from_pretrained(
        base, engine_config(timeout_s=60.0, **settings), method=method(name, **options)
    ) as engine:
        return {n: t.numpy() for n, t in engine.named_parameters()}


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("lora", {}, {}),
        ("dora", QV, {}),
        ("lora", {"init": "gaussian"}, {"stage": 1}),
        ("rslora", {}, {"precision": "bf16"}),
    ],
    ids=str,
)
def test_32_first_values_do_not_depend_on_ranks(name, options, settings, tmp_path):
    """The first A is a function of seed and layer name alone: bitwise the same at world sizes 1, 2, 3 and on every rank."""
    base = base_folder("llama", tmp_path / "base")
    [one] = run_ranks(1, first_values, str(base), name, options, settings)
    a = [value for key, value in one.items() if "lora_A" in key]
    assert len({value.tobytes() for value in a}) == len(a)
    for size in (2, 3):
        for other in run_ranks(size, first_values, str(base), name, options, settings):
            assert other.keys() == one.keys() and all((other[key] == value).all() for key, value in one.items())
