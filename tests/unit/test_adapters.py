"""Adapters on the meta model: what is targeted, what is refused, first values, what a frozen weight costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.adapters import (
    OPTIM,
    base_folder,
    batches,
    difference,
    engine_config,
    gradients,
    method,
    peft_model,
    random_adapter,
)
from tests.plain import plain_loop
from tests.tiny import tiny_model
from zft.api import Engine
from zft.config import ZftError
from zft.models.adapters import attach_adapter, lora_config
from zft.models.load import HubWeights, build_model, grow
from zft.models.targets import find_targets


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return base_folder("llama", tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return base_folder("llama_tied", tmp_path_factory.mktemp("tied") / "base")


def attached(base: Path, options, dtype: torch.dtype = torch.float32, new_tokens: int = 0):
    model = build_model(base, dtype)
    rows = model.get_input_embeddings().weight.shape[0]
    if new_tokens:
        grow(model, rows + new_tokens)
    return attach_adapter(model, HubWeights(base, model), options, 3, range(rows, rows + new_tokens))


def trained(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# targets


def test_all_linear_is_every_linear_layer_but_the_head(llama):
    """Case 30: by full name, so that a layer elsewhere that shares the head's last name part isn't lost or hit."""
    model, _ = attached(llama, method())
    linear = [n for n, m in tiny_model("llama").named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    assert len(linear) == 14
    assert trained(model) == {f"base_model.model.{n}.lora_{x}.default.weight" for n in linear for x in "AB"}
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("q_proj", "v_proj"), 4),
        (("self_attn.q_proj",), 2),
        (("model.layers.1.mlp.up_proj",), 1),
        ((r".*layers\.0\..*(q|k)_proj",), 2),
        (("lm_head",), 1),
        (("embed_tokens", "q_proj"), 3),
        (("all-linear", "lm_head"), 15),
    ],
)
def test_targets_match(llama, targets, count):
    assert len(trained(attached(llama, method(targets=targets))[0])) == 2 * count


@pytest.mark.parametrize("targets", [("q_proj", "c_attn"), ("mlp",), (r".*\.wq",), ("proj",)])
def test_an_unmatched_target_is_an_error_with_the_list(llama, targets):
    with pytest.raises(ZftError, match="matches nothing.*all-linear, embed_tokens, q_proj, k_proj.*lm_head"):
        attached(llama, method(targets=targets))


def test_odd_targets_are_errors(llama):
    with pytest.raises(ZftError, match="is no pattern"):
        attached(llama, method(targets=("(q_proj",)))
    with pytest.raises(ZftError, match="method.targets is empty"):
        attached(llama, method(targets=()))
    with pytest.raises(ZftError, match="modules_to_save names 'head'.*lm_head"):
        attached(llama, method(modules_to_save=("head",)))
    with pytest.raises(ZftError, match="method.init is one of default, gaussian, got 'pissa'"):
        attached(llama, method(init="pissa"))


def test_fused_experts_are_targets_too():
    model = tiny_model("mixtral")
    assert find_targets(model, ("q_proj", "experts.down_proj")).parameters == [
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.1.mlp.experts.down_proj",
    ]


def test_dora_on_fused_experts_says_what_to_do(tmp_path):
    base = base_folder("qwen3_moe", tmp_path / "base")
    with pytest.raises(ZftError, match=r"method.targets=\[q_proj,k_proj,v_proj,o_proj\]"):
        attached(base, method("dora"))
    assert len(trained(attached(base, method("dora", targets=("q_proj",)))[0])) == 6


@pytest.mark.parametrize(
    "options", [{"targets": ("lm_head",)}, {"targets": ("embed_tokens",)}, {"modules_to_save": ("lm_head",)}]
)
def test_a_tied_head_is_refused_before_training(tied, llama, options):
    """Case 14: merging or reloading would change the other of the two."""
    with pytest.raises(ZftError, match="share one weight"):
        attached(tied, method(**options))
    assert trained(attached(llama, method(**options))[0])
    assert trained(attached(tied, method())[0])


# first values


def test_first_a_is_kaiming_uniform_and_b_zero(llama):
    model, source = attached(llama, method(targets=("down_proj", "q_proj")))
    values = dict(source.read(sorted(trained(model))))
    for name, tensor in values.items():
        bound = (1 / tensor.shape[1]) ** 0.5  # kaiming_uniform_ with a = sqrt(5)
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert tensor.dtype == torch.float32 and 0.8 * bound < tensor.abs().max() <= bound
    a = [tensor for name, tensor in values.items() if "lora_A" in name and "q_proj" in name]
    assert not torch.equal(*a)
    one = next(name for name in values if "lora_A" in name)
    assert torch.equal(dict(source.read([one]))[one], values[one])  # alone as among others
    other, another = attached(llama, method(targets=("q_proj",)))
    assert all(torch.equal(tensor, values[name]) for name, tensor in another.read(sorted(trained(other))))


def test_modules_to_save_start_as_the_base(llama):
    """Case 23: full shape, equal to the base, and trained."""
    with Engine.from_pretrained(llama, engine_config(), method=method(modules_to_save=("lm_head",))) as engine:
        values = dict(engine.named_parameters())
        copy = values["base_model.model.lm_head.modules_to_save.default.weight"]
        assert torch.equal(copy, tiny_model("llama").lm_head.weight)
        engine.step(batches(2))
        after = dict(engine.named_parameters())
        assert not torch.equal(after["base_model.model.lm_head.modules_to_save.default.weight"], copy)
        assert torch.equal(after["base_model.model.lm_head.original_module.weight"], copy)


# cost


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_frozen_weight_costs_its_bytes_and_an_adapter_has_float32_masters(llama, precision):
    """Cases 27, 31; no gradient, moment or master of the base on any tier."""
    with Engine.from_pretrained(llama, engine_config(precision=precision), method=method()) as engine:
        for group, record in engine.parts.records.items():
            names = set(record.slabs)
            if group.trainable:
                assert all("lora_" in span.name for span in group.layout.spans)
                assert names == ({"hi", "lo", "m", "v", "grad"} if precision == "bf16" else {"hi", "m", "v", "grad"})
            else:
                assert names == {"hi"}
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
        before = dict(engine.named_parameters())[name]
        _, first = attached(llama, method())
        engine_seed = dict(first.read([name]))[name]
        assert before.dtype == torch.float32 and before.shape == engine_seed.shape
        assert not torch.equal(before, before.bfloat16().float())  # the master is not rounded


def test_the_base_is_read_twice_a_step_and_never_written(llama, tmp_path):
    config = engine_config(param_tier="nvme", nvme_dir=str(tmp_path / "tiers"))
    with Engine.from_pretrained(llama, config, method=method()) as engine:
        engine.step(batches(3))
        traffic = engine.step(batches(3)).traffic
        reads, adapter = 0, 0
        for unit in engine.parts.units:
            once = "embed" in unit.name or "lm_head" in unit.name
            for group in unit.groups:
                size = engine.parts.records[group].ranges.hi_numel * 4
                adapter += size if group.trainable else 0
                reads += size * (1 if once else 2)
        assert traffic["nvme_read"] == reads
        assert traffic["nvme_write"] == adapter  # the updated adapter itself


# going on from an adapter


def test_an_adapter_that_does_not_fit_is_refused(llama, tmp_path):
    adapter = random_adapter(llama, tmp_path / "adapter", method(targets=("q_proj",)))
    config = json.loads((adapter / "adapter_config.json").read_text())

    def changed(**settings) -> Path:
        (adapter / "adapter_config.json").write_text(json.dumps({**config, **settings}))
        return adapter

    for name, settings, message in [
        ("lora", {"r": 8}, r"lora_A.weight is \[4, 32\] where the model has \[8, 32\]"),
        ("lora", {"target_modules": ["q_proj", "k_proj"]}, "k_proj.lora_A.weight is missing"),
        ("lora", {"target_modules": ["v_proj"]}, "q_proj.lora_A.weight has no place"),
        ("lora", {"init_lora_weights": "pissa"}, "initialised with pissa"),
        ("lora", {"bias": "all"}, "bias='all'"),
        ("lora", {"peft_type": "IA3"}, "IA3"),
        ("dora", {}, "is a lora adapter, but method=dora; set method=lora"),
    ]:  # fmt: skip
        with pytest.raises(ZftError, match=message):
            attached(llama, method(name, adapter=str(changed(**settings))))
    with pytest.raises(ZftError, match=r"has no adapter_config.json"):
        attached(llama, method(adapter=str(llama)))
    assert attached(llama, method(adapter=str(changed())))


# new tokens


@pytest.mark.parametrize("arch", ["llama", "llama_tied"])
def test_new_tokens_have_peft_gradients(arch, tmp_path):
    """Case 17: rows of new tokens are trained and nothing else of the embedding is."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = base_folder(arch, tmp_path / "base")
    wrapped, source = attached(base, method(), new_tokens=2)
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    reference.resize_token_embeddings(66, mean_resizing=False)
    reference = get_peft_model(reference, lora_config(reference, method(), (64, 65)))
    with Engine(wrapped, engine_config(), source) as engine:
        start = dict(engine.named_parameters())
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(start[name])
        rows = [name for name in start if "trainable_tokens_delta" in name]
        assert len(rows) == (1 if arch == "llama_tied" else 2) and all(start[name].shape == (2, 32) for name in rows)
        steps = [batches(2, vocab=66, seed=seed) for seed in range(2)]
        plain = plain_loop(reference, steps, OPTIM, max_grad_norm=1.0)
        for index, micro_batches in enumerate(steps):
            result = engine.step(micro_batches)
            assert abs(result.loss - plain.losses[index]) <= 1e-6
            assert difference(gradients(engine), plain.gradients[index]) <= 1e-6
        assert all(gradients(engine)[name].abs().max() > 0 for name in rows)


def test_qlora_is_the_plain_loop_on_dequantized_weights(llama, tmp_path):
    from zft.models.nf4 import NF4

    adapter = random_adapter(llama, tmp_path / "adapter", method())
    reference = peft_model(llama, adapter, trainable=True)
    config = engine_config(param_tier="nvme", nvme_dir=str(tmp_path / "tiers"))
    with Engine.from_pretrained(llama, config, method=method("qlora", adapter=str(adapter))) as engine:
        quantized = [g for g in engine.parts.records if g.codec is not None]
        names = {span.name for group in quantized for span in group.layout.spans}
        assert len(names) == 14 and not any("lm_head" in name or "norm" in name for name in names)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if name in names:
                    blob = torch.empty(NF4.nbytes(parameter.numel()), dtype=torch.uint8)
                    NF4.encode(parameter.flatten(), blob)
                    NF4.decode(blob, parameter.view(-1))
        steps = [batches(2, seed=seed) for seed in range(2)]
        plain = plain_loop(reference, steps, OPTIM, max_grad_norm=1.0)
        for index, micro_batches in enumerate(steps):
            assert abs(engine.step(micro_batches).loss - plain.losses[index]) <= 1e-6
            assert difference(gradients(engine), plain.gradients[index]) <= 1e-6
        for group in quantized:
            assert engine.parts.records[group].nvme_bytes(engine.config) <= group.layout.padded_numel * 4.5 / 8 + 4096


def test_evaluation_with_and_without_the_adapter(llama, tmp_path):
    adapter = random_adapter(llama, tmp_path / "adapter", method())
    with Engine.from_pretrained(llama, engine_config(), method=method(adapter=str(adapter))) as engine:
        on, off = engine.evaluate(batches(2)), engine.evaluate(batches(2), adapter=False)
        assert engine.evaluate(batches(2)).loss == on.loss
        engine.step(batches(2))
    with Engine.from_pretrained(llama, engine_config()) as plain:
        assert abs(plain.evaluate(batches(2)).loss - off.loss) <= 1e-6 < abs(on.loss - off.loss)
        with pytest.raises(ZftError, match="has none"):
            plain.evaluate(batches(1), adapter=False)
