"""Buffers of the engine's pools: sizes, reuse, limits."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from tests.tiny import tiny_model
from zft.api import Engine, EngineConfig
from zft.dist import World
from zft.engine.pool import BufferPool


def test_a_small_group_never_holds_a_large_buffer():
    """Whatever the order in which a layer and its adapter come and go, one buffer of each size is made."""
    made = []

    def make(count_bytes: int) -> torch.Tensor:
        made.append(count_bytes)
        return torch.empty(count_bytes, dtype=torch.uint8)

    pool = BufferPool(1 << 20, make)
    for order in ((0, 1), (1, 0), (0, 1)):
        taken = [pool.acquire((200_000, 500)[which], torch.float32) for which in order]
        for tensor in taken:
            pool.release(tensor)
    assert sorted(made) == [4096, 1 << 20]


@pytest.mark.parametrize("capacity", [1, 4096, 5000, 1 << 20, 262_144_000])
def test_sizes_hold_what_is_asked(capacity):
    pool = BufferPool(capacity, lambda count_bytes: torch.empty(0, dtype=torch.uint8).expand(0))
    for needed in {0, 1, 4096, capacity // 64, capacity // 8, capacity // 8 + 1, capacity - 1, capacity}:
        size = pool._size(min(needed, pool.capacity_bytes))
        assert needed <= size <= pool.capacity_bytes or needed > pool.capacity_bytes
        assert size <= max(8 * needed, 4096) + 8 * 4096


def test_a_full_pool_waits():
    pool = BufferPool(4096, limit=2)
    first, _ = pool.acquire(8, torch.uint8), pool.acquire(8, torch.uint8)
    got = []
    waiter = threading.Thread(target=lambda: got.append(pool.acquire(8, torch.uint8)))
    waiter.start()
    waiter.join(0.2)
    assert not got
    pool.release(first)
    waiter.join(5)
    assert len(got) == 1 and pool.owns(got[0])


def test_a_wrong_release_is_found():
    pool = BufferPool(4096)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(torch.empty(8))


def test_what_nobody_holds_is_forgotten():
    pool = BufferPool(1 << 20, limit=2)
    held, given = pool.acquire(9, torch.uint8), pool.acquire(9, torch.uint8)
    address = weakref.ref(pool.taken[given.data_ptr()])
    pool.release(given)
    del given
    pool.forget()
    assert address() is None and pool.owns(held)
    pool.release(held)


def test_an_export_leaves_no_trace_in_the_steps_after_it(tmp_path):
    """The buffers of a step are given back before it; the next step makes them again and finds the same numbers."""
    rows = torch.arange(5, 21).view(1, -1)
    batch = {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}

    def losses(export: bool) -> list[float]:
        found = []
        tiers = dict.fromkeys(("param_tier", "state_tier", "grad_tier"), "nvme")
        config = EngineConfig(nvme_dir=str(tmp_path / "nvme"), compute_dtype="float32", **tiers)  # hi is cast to a slot
        with Engine(tiny_model("llama"), config, world=World.single("cpu")) as engine:
            for _ in range(3):
                found.append(engine.step([batch], lr=0.01).loss)
                if export:
                    assert engine.parts.sharder.slots.free
                    units = engine.stream_units()
                    next(units)
                    assert not engine.parts.sharder.slots.free and not engine.parts.gradients.flats.free
                    assert len(list(units)) > 2
        return found

    assert losses(True) == losses(False)
