"""The backward pass: the tape walked backwards. No autograd hook decides anything here."""

from __future__ import annotations

import time

import torch
from torch import nn

from zft.config import Activation
from zft.dist import World
from zft.engine.gate import Gates
from zft.engine.gradient import Gradients
from zft.engine.schedule import Fetcher
from zft.engine.tape import Entry, Tape, Visit
from zft.engine.unit import ParamGroup, Unit
from zft.engine.unshard import Sharder
from zft.tiers.device import Recorder


class Backward:
    """Walks one tape after another."""

    def __init__(
        self, gates: Gates, sharder: Sharder, fetcher: Fetcher, gradients: Gradients, world: World, record: Recorder
    ):
        self.gates, self.sharder, self.fetcher, self.gradients = gates, sharder, fetcher, gradients
        self.world, self.record = world, record

    def walk(self, tape: Tape, last_wave: bool, head: Unit | None) -> None:
        """Every visit of the tape, latest first. `head`: its backward pass ran in its forward visit already."""
        remaining = [visit for visit in tape.visits if visit.unit is not head]
        seen = zip(*self.world.gather_ints([len(visit.entries) for visit in remaining]), strict=True)
        for visit, counts in zip(remaining, seen, strict=True):
            visit.is_entered = any(counts)
        for visit in remaining:
            for group in trained(visit.unit):
                group.awaited += 1
        while remaining:
            visit = remaining.pop()
            tape.flush(visit.number)
            wanted = self._anyone_wants(visit)
            for group in trained(visit.unit):
                group.awaited -= 1
            if wanted:
                self._visit(visit, tape, remaining, last_wave)
            visit.entries.clear()
        tape.flush(-1)

    def close(self, groups: list[ParamGroup], last_wave: bool) -> None:
        """Agree on what was used, then reduce each group's gradients. Collective."""
        if self.world.size > 1:
            flags = [int(flag) for group in groups for flag in group.used]
            merged = [any(column) for column in zip(*self.world.gather_ints(flags), strict=True)]
            for group in groups:
                group.used, merged = merged[: len(group.used)], merged[len(group.used) :]
        for group in groups:
            self.gradients.close(group, last=last_wave and group.awaited == 0)

    def _anyone_wants(self, visit: Visit) -> bool:
        mine = any(entry.wanted for entry in visit.entries)
        return any(row[0] for row in self.world.gather_ints([int(mine)]))

    def _visit(self, visit: Visit, tape: Tape, remaining: list[Visit], last_wave: bool) -> None:
        unit, groups = visit.unit, trained(visit.unit)
        light = is_plain_embedding(unit)
        if not light:
            self.sharder.unshard(unit)
        self.fetcher.prefetch(
            next((v.unit for v in reversed(remaining) if v.is_entered and not is_plain_embedding(v.unit)), None)
        )
        started = time.perf_counter()
        self.gradients.open(groups)
        for entry in visit.entries:
            if not entry.wanted:
                continue
            if light:
                _embedding_backward(unit, entry)
            else:
                self._entry(unit, entry, tape)
        self.record("compute", f"backward {unit.name}", started, time.perf_counter())
        self.close(groups, last_wave)
        if not light:
            self.sharder.reshard(unit)

    def _entry(self, unit: Unit, entry: Entry, tape: Tape) -> None:
        if self.gates.activation is Activation.none:
            pairs = entry.graph.pairs
            # a tensor that left sideways was cut from the rest of the unit, which adds its own gradient to the slot: walk the
            # rest first. What lies before both is walked once for each
            walks = [(entry.graph.outputs, entry.outputs)]
            walks += [([t], [s]) for t, s in zip(reversed(entry.graph.sideways), reversed(entry.sideways), strict=True)]
            for number, (tensors, slots) in enumerate(walks, 1):
                _run(tensors, slots, keep=number < len(walks))
        else:
            outputs, pairs, sideways = self.gates.recompute(unit, entry)
            _run([*outputs, *sideways], [*entry.outputs, *entry.sideways])
        for kept, leaf in pairs:
            tape.deliver(kept, leaf.grad)


def trained(unit: Unit) -> list[ParamGroup]:
    return [group for group in unit.needed if group.trainable]


def is_plain_embedding(unit: Unit) -> bool:
    """An embedding whose gradient needs no weights."""
    module = unit.module
    return type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq


def _run(tensors: list[torch.Tensor], slots: list, keep: bool = False) -> None:
    assert len(tensors) == len(slots), "a unit returned another number of tensors when it ran again"
    due = [
        (t, s.gradient) for t, s in zip(tensors, slots, strict=True) if s and s.gradient is not None and t.requires_grad
    ]
    if due:
        torch.autograd.backward([t for t, _ in due], [g.to(t.dtype) for t, g in due], retain_graph=keep)


def _embedding_backward(unit: Unit, entry: Entry) -> None:
    """weight.grad[id] += gradient of every position with that id; the padding index has none (torch.nn.Embedding)."""
    module = unit.module
    ids = next(leaf for leaf in entry.leaves if hasattr(leaf, "value")).value.reshape(-1)
    gradient = entry.outputs[0].gradient.reshape(ids.numel(), -1).float()
    if module.padding_idx is not None:
        kept = ids != module.padding_idx
        ids, gradient = ids[kept], gradient[kept]
    weight = module.weight
    group = next(g for g in trained(unit) if any(p is weight for p in g.meta))
    group.gradient(weight).index_add_(0, ids, gradient)
