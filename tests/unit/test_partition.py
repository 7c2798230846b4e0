"""Cutting models into units: owners of tied parameters, weight decay, large leftovers, the fallback without hints."""

import pytest
import torch
from torch import nn

from tests.tiny import FAMILIES, tiny_model
from zft.engine import partition
from zft.engine.partition import GroupSpec, build_units, decays, is_norm, unit_modules


def spec_of(ranks: int = 1) -> GroupSpec:
    return GroupSpec(ranks, lambda _name, _p: (torch.float32, torch.float32, None))


def units_of(model, ranks: int = 1):
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return build_units(model, unit_modules(model, sorted(model._no_split_modules), ends), spec_of(ranks))


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_parameter_has_one_owner_and_every_layer_is_a_unit(arch):
    model = tiny_model(arch)
    names = {name for name, _ in model.named_parameters()}
    units, leftovers = units_of(model)
    owned = [span.name for unit in [*units, leftovers] for group in unit.groups for span in group.layout.spans]
    assert sorted(owned) == sorted(names)
    assert sum(1 for unit in units if unit.name.rpartition(".")[2].isdigit()) == model.config.num_hidden_layers
    assert [unit.index for unit in units] == list(range(len(units)))
    assert all(p.is_meta for p in model.parameters())


def test_tied_head_borrows_from_the_embedding():
    units, _ = units_of(tiny_model("llama_tied"))
    embedding, head = units[0], units[-1]
    assert not head.groups and head.borrowed == embedding.groups
    assert embedding.groups[0].sites[0] == [(embedding.module, "weight"), (head.module, "weight")]


def test_a_frozen_parameter_goes_into_a_group_of_its_own():
    model = tiny_model("llama")
    model.model.layers[0].mlp.requires_grad_(False)
    units, _ = units_of(model)
    layer = next(u for u in units if u.name == "model.layers.0")
    assert [g.trainable for g in layer.groups] == [True, False]
    assert all(".mlp." in span.name for span in layer.groups[1].layout.spans)


def test_without_hints_the_longest_list_of_modules_gives_the_layers():
    model = nn.Module()
    model.short = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.long = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert [name for name, _ in unit_modules(model, (), ())] == ["long.0", "long.1", "long.2"]
    assert unit_modules(nn.Linear(2, 2), (), ()) == []


def test_a_layer_inside_a_layer_belongs_to_the_outer_one():
    class Block(nn.Module):
        def __init__(self, inner=None):
            super().__init__()
            self.inner = inner
            self.weight = nn.Parameter(torch.zeros(2))

    model = nn.Sequential(Block(Block()), Block())
    assert [name for name, _ in unit_modules(model, ["Block"], ())] == ["0", "1"]


def test_large_leftovers_become_units(monkeypatch):
    monkeypatch.setattr(partition, "LARGE_NUMEL", 50)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    model.table, model.small = nn.Embedding(26, 2), nn.Linear(5, 5)
    modules = unit_modules(model, (), ())
    assert [name for name, _ in modules] == ["layers.0", "table"]
    units, leftovers = build_units(model, modules, spec_of(ranks=4))
    (group,) = leftovers.groups
    assert [span.name for span in group.layout.spans] == ["small.weight", "small.bias"]
    assert group.replicated and group.layout.ranks == 1 and units[0].groups[0].layout.ranks == 4


@pytest.mark.parametrize("arch", FAMILIES)
def test_norms_and_biases_never_decay_and_matrices_do(arch):
    model = tiny_model(arch)
    norms = {id(p) for m in model.modules() if is_norm(m) for p in m.parameters(recurse=False)}
    decaying = {name for name, p in model.named_parameters() if decays(name, p, norms)}
    assert {n for n, p in model.named_parameters() if p.dim() >= 2 and not n.endswith("bias")} == decaying
    assert not any(
        "norm" in name.rpartition(".")[0].rpartition(".")[2].lower() or name.endswith("bias") for name in decaying
    )


def test_a_norm_is_known_by_its_type_or_its_name():
    class MyRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

    norm = MyRMSNorm()
    assert not decays("x.scale.weight", norm.weight, {id(norm.weight)}) and is_norm(norm)
    assert not decays("x.ln_1.weight", torch.zeros(2, 2), set())
    assert decays("x.proj.weight", torch.zeros(2, 2), set())
