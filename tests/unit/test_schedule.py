"""The schedule: recorded order of fetch, compute, reduce and update against the expected one, also with delays."""

import os
import time
from concurrent.futures import Future

import pytest
import torch

from tests.recorded import Log, Meeting
from tests.toy import Toy, square_loss, toy_batches, toy_config
from zft.api import Engine
from zft.engine.schedule import Order
from zft.engine.unit import Unit

NVME = {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"}
BACKWARD = {"max_grad_norm": None, "nonfinite": "raise"}
LAYERS = ["layers.0", "layers.1", "layers.2"]
SLOW_S = 0.03


class SlowToy(Toy):
    """Each layer computes for a while."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.norm.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))


def logged_step(kind: type[Toy] = Toy, before=lambda engine: None, steps: int = 3, **settings) -> Log:
    """The last of some steps."""
    log = Log()
    with Engine(kind(), toy_config(**settings), record=log) as engine:
        before(engine)
        for mbs in toy_batches(2, steps):
            log.rows.clear()
            engine.step(mbs, loss_fn=square_loss)
    return log


def expected_compute(first_unshards: list[str]) -> list[str]:
    names = ["embed", *LAYERS]
    forward = [work for name in names for work in (f"unshard {name}", f"forward {name}")]
    backward = [w for name in reversed(LAYERS) for w in (f"unshard {name}", f"backward {name}", f"reduce {name}#0")]
    # the embedding's gradient needs no weights; the head belongs to the leftovers, which are reduced last
    return [*first_unshards, *forward, *backward, "backward embed", "reduce embed#0", "reduce leftovers#0"]


@pytest.mark.parametrize("update", [{}, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("tiers", [{}, NVME], ids=["device", "nvme"])
@pytest.mark.parametrize("slow", [Toy, SlowToy])
def test_compute_in_order(slow, tiers, update, tmp_path):
    log = logged_step(slow, nvme_dir=str(tmp_path / "tiers"), **tiers, **update)
    assert log.work("compute") == expected_compute(["unshard leftovers"])


def test_updates_run_in_the_next_forward_pass_each_ahead_of_its_unit(tmp_path):
    log = logged_step(SlowToy, nvme_dir=str(tmp_path / "tiers"), **NVME)
    assert log.work("update") == ["leftovers#0", "embed#0", *(f"{name}#0" for name in LAYERS)]
    for name in ["embed", *LAYERS]:
        assert log.span("update", f"{name}#0")[1] <= log.span("compute", f"unshard {name}")[0]


def test_the_first_step_has_nothing_to_update():
    assert logged_step(steps=1).work("update") == []


def test_updates_in_the_backward_pass_follow_each_reduction():
    log = logged_step(SlowToy, **BACKWARD)
    assert log.work("update") == [*(f"{name}#0" for name in reversed(LAYERS)), "embed#0", "leftovers#0"]
    for name in [*LAYERS, "embed"]:
        assert log.span("update", f"{name}#0")[0] >= log.span("compute", f"reduce {name}#0")[0]


def meet(method: str, owner: str, expected: list[int], tmp_path) -> None:
    """A steady step in which the i-th computation of a layer goes on after expected[i] calls have begun elsewhere."""
    with Engine(Toy(), toy_config(nvme_dir=str(tmp_path / "tiers"), **NVME)) as engine:
        for mbs in toy_batches(1, 2):
            engine.step(mbs, loss_fn=square_loss)
        meeting, left = Meeting(getattr(engine.parts, owner), method), list(expected)
        for layer in engine.model.layers:
            layer.norm.register_forward_pre_hook(lambda *_: meeting.wait_for(left.pop(0)))
        engine.step(toy_batches(1)[0], loss_fn=square_loss)
        assert not left and meeting.count >= max(expected)


def test_the_next_unit_is_fetched_while_this_one_computes(tmp_path):
    """Fetches: leftovers, embed, layers 0 1 2, then 2 1 0; the last of the forward pass brings the first backward."""
    meet("_fetch", "fetcher", [4, 5, 6, 7, 8, 8], tmp_path)


def test_gradients_are_written_while_the_next_unit_computes(tmp_path):
    """Forward three times, then backward: layer 1 goes on when layer 2's gradient is on its way."""
    meet("_store", "gradients", [0, 0, 0, 0, 1, 2], tmp_path)


def test_a_slow_disk_delays_but_does_not_reorder(tmp_path):
    def slow_reads(engine):
        def preadv(fd, buffers, offset):
            time.sleep(SLOW_S)
            return os.preadv(fd, buffers, offset)

        engine.parts.folder._preadv = preadv

    log = logged_step(Toy, slow_reads, nvme_dir=str(tmp_path / "tiers"), **NVME)
    assert log.work("compute") == expected_compute(["unshard leftovers"])
    for name in ["embed", *LAYERS]:
        assert log.span("update", f"{name}#0")[1] <= log.span("compute", f"unshard {name}")[0]


def test_several_waves_update_once_and_unshard_in_each(tmp_path):
    log = logged_step(nvme_dir=str(tmp_path / "tiers"), wave=1, **NVME)
    assert sorted(log.work("update")) == sorted(["leftovers#0", "embed#0", *(f"{name}#0" for name in LAYERS)])
    assert log.work("compute").count("forward layers.1") == 2 and log.work("compute").count("backward layers.1") == 2
    assert log.work("compute").count("unshard layers.1") == 4


def test_a_wave_of_many_micro_batches_unshards_no_more_than_a_wave_of_one():
    few, many = Log(), Log()
    for log, count in ((few, 1), (many, 8)):
        with Engine(Toy(), toy_config(), record=log) as engine:
            engine.step(toy_batches(count)[0], loss_fn=square_loss)
    assert few.work("compute") == many.work("compute")


class Turning(Toy):
    """The order of the layers changes from step to step, so that every guess is wrong."""

    turn = 0

    def body(self, x):
        order = list(self.layers)
        for _ in range(self.turn % 3):
            order.append(order.pop(0))
        for layer in order if self.turn % 2 else reversed(order):
            x = layer(x)
        return x


@pytest.mark.parametrize("update", [{}, BACKWARD], ids=["forward", "backward"])
def test_wrong_guesses_cost_time_and_nothing_else(update, tmp_path):
    weights = []
    for settings in (NVME, {}):
        with Engine(Turning(), toy_config(nvme_dir=str(tmp_path / "tiers"), **settings, **update)) as engine:
            for number, mbs in enumerate(toy_batches(2, 6)):
                engine.model.turn = number
                engine.step(mbs, loss_fn=square_loss)
            pool = engine.parts.fetcher.host
            weights.append(dict(engine.named_parameters()))
            assert len(pool.taken) <= 1, "more than the leftovers' staging buffer was not given back"
            assert sum(map(len, pool.free.values() if isinstance(pool.free, dict) else [pool.free])) <= 4
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


class Sometimes(Toy):
    """The last layer borrows the first one's weights, and runs in every other step."""

    turn = 0

    def __init__(self):
        super().__init__()
        self.layers[2].inner = self.layers[0].inner

    def body(self, x):
        for layer in self.layers if self.turn % 2 == 0 else self.layers[:2]:
            x = layer(x)
        return x


@pytest.mark.parametrize("update", [{}, BACKWARD], ids=["forward", "backward"])
def test_weights_fetched_on_a_wrong_guess_are_not_used_a_step_later(update, tmp_path):
    losses = []
    for settings in (NVME, {}):
        with Engine(Sometimes(), toy_config(nvme_dir=str(tmp_path / "tiers"), **settings, **update)) as engine:
            losses.append([])
            for number, mbs in enumerate(toy_batches(2, 6)):
                engine.model.turn = number
                losses[-1].append(engine.step(mbs, loss_fn=square_loss).loss)
    assert losses[0] == losses[1]


# the order of units


def units(count: int) -> list[Unit]:
    return [Unit(f"u{i}", None, i, []) for i in range(count)]


def walk(order: Order, path: list[Unit]) -> list[Unit | None]:
    order.begin()
    guesses = [order.after(unit) for unit in path]
    order.end()
    return guesses


def test_the_first_guess_is_the_order_of_the_modules_then_what_was_seen():
    a, b, c = units(3)
    order = Order([a, b, c])
    assert walk(order, [a, b, c]) == [b, c, None]
    walk(order, [c, a, b])
    assert order.known == [c, a, b]
    assert walk(order, [c, a, b]) == [a, b, None]


def test_a_shared_unit_is_told_apart_by_its_place():
    a, b, c = units(3)
    order = Order([a, b, c])
    walk(order, [a, b, a, c])
    assert walk(order, [a, b, a, c]) == [b, a, c, None]


def test_a_path_that_leaves_the_known_one_is_guessed_from_the_unit():
    a, b, c = units(3)
    order = Order([a, b, c])
    assert walk(order, [b, a, c]) == [c, b, None]


# the fetcher's promises


def test_an_error_on_the_way_is_raised_where_the_unit_is_taken(tmp_path):
    with Engine(Toy(), toy_config(nvme_dir=str(tmp_path / "tiers"), **NVME)) as engine:
        unit, fetcher = engine.parts.units[1], engine.parts.fetcher
        engine.parts.folder._preadv = lambda *_: 0
        fetcher.prefetch(unit)
        assert isinstance(fetcher.waiting[unit], Future)
        with pytest.raises(OSError, match="nvme read"):
            fetcher.take(unit)
        fetcher.prefetch(unit)
        with pytest.raises(OSError, match="nvme read"):
            fetcher.settle()
        assert not fetcher.waiting


def test_what_is_at_hand_is_not_fetched(tmp_path):
    with Engine(Toy(), toy_config()) as engine:
        engine.parts.fetcher.prefetch(engine.parts.units[1])
        assert not engine.parts.fetcher.waiting
    with Engine(Toy(), toy_config(nvme_dir=str(tmp_path / "tiers"), **NVME)) as engine:
        fetcher, unit = engine.parts.fetcher, engine.parts.units[1]
        fetcher.prefetch(unit)
        fetcher.prefetch(unit)
        assert len(fetcher.waiting) == 1
        fetcher.settle()
        assert not fetcher.host.taken
