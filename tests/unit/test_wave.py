"""Waves: which unit is next when micro-batches take different paths."""

import pytest
import torch

from zft.dist import World
from zft.engine.context import TorchContext
from zft.engine.unit import Unit
from zft.engine.wave import FINISHED, MicroBatch, visits

UNITS = [Unit(name, None, index, []) for index, name in enumerate("abcd")]


def walker(number: int, path: str) -> MicroBatch:
    """A forward pass that visits the named units."""

    def run(micro_batch):
        for name in path:
            micro_batch.park(UNITS["abcd".index(name)])
        return path

    micro_batch = MicroBatch(number, {}, None, run)
    micro_batch.context = TorchContext.capture(torch.device("cpu"))
    return micro_batch


def order_of(*paths: str, world: World | None = None) -> list[tuple[str, list[int]]]:
    """(unit, numbers of the micro-batches that use it) for each visit."""
    rows, seen = [walker(i, path) for i, path in enumerate(paths)], []
    for unit, arrivals in visits(rows, UNITS, world or World.single("cpu")):
        seen.append((unit.name, [mb.number for mb in arrivals]))
        for micro_batch in arrivals:
            micro_batch.resume(torch.device("cpu"))
    assert all(mb.finished and mb.result == path for mb, path in zip(rows, paths, strict=True))
    return seen


def test_all_micro_batches_share_each_visit():
    assert order_of("abcd", "abcd", "abcd") == [(name, [0, 1, 2]) for name in "abcd"]


def test_a_micro_batch_that_skips_a_unit_waits_for_the_others():
    assert order_of("abcd", "ad") == [("a", [0, 1]), ("b", [0]), ("c", [0]), ("d", [0, 1])]


def test_a_unit_used_twice_is_visited_twice():
    assert order_of("abab") == [("a", [0]), ("b", [0]), ("a", [0]), ("b", [0])]
    assert order_of("aab", "ab") == [("a", [0, 1]), ("a", [0]), ("b", [0, 1])]


def test_no_units_and_no_micro_batches():
    assert order_of("") == [] and order_of() == []


class FakeWorld:
    """Other ranks' proposals, in advance."""

    device = torch.device("cpu")

    def __init__(self, *others: list[int]):
        self.others, self.asked = list(others), []

    def gather_ints(self, values):
        self.asked.append(values[0])
        return [values, *([row] for row in self.others.pop(0))]


def test_ranks_agree_on_the_earliest_unit():
    """This rank is at b, another still at a; then this rank is through and another at d."""
    world = FakeWorld([0], [1], [3], [FINISHED])
    assert order_of("b", world=world) == [("a", []), ("b", [0]), ("d", [])]
    assert world.asked == [1, 1, FINISHED, FINISHED]


def test_an_error_in_a_micro_batch_comes_out_of_the_walk():
    def fails(micro_batch):
        micro_batch.park(UNITS[0])
        raise ValueError("bad row")

    micro_batch = MicroBatch(0, {}, None, fails)
    micro_batch.context = TorchContext.capture(torch.device("cpu"))
    with pytest.raises(ValueError, match="bad row"):
        for _, arrivals in visits([micro_batch], UNITS, World.single("cpu")):
            arrivals[0].resume(torch.device("cpu"))
