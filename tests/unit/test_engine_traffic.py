"""Traffic of a step equals DESIGN's sums, written out here on their own; the planner's: test_traffic_sums.

A bf16 layer with everything on NVMe and W waves, per parameter: read 12 + 4W - 2 + g, written 12 + g; in 4W, out 2. A
wave after the first parks 4 out and brings 4 back.
"""

import pytest

from tests.parity.cells import batches
from tests.tiny import tiny_model
from zft.api import Engine
from zft.config import EngineConfig, Tier

BACKWARD = {"max_grad_norm": None, "nonfinite": "raise"}


def expected(engine: Engine, waves: int, immediate: bool) -> dict[str, int]:
    """Bytes of one steady step, untied bf16 model on NVMe: layers, embedding, head, leftovers, by padded numel."""
    on_disk = engine.config.grad_tier is Tier.nvme
    total = dict.fromkeys(("nvme_read", "nvme_write", "h2d", "d2h"), 0)

    def add(numel: int, **bytes_each: float) -> None:
        for route, each in bytes_each.items():
            total[route] += int(numel * each)

    for unit in engine.parts.units:
        numel = sum(group.layout.padded_numel for group in unit.groups)
        is_layer = unit.name.rpartition(".")[2].isdigit()
        visits = waves * (2 if is_layer else 1)  # embedding: no weights backward; head: one visit
        g = 2 if on_disk and not immediate else 0
        # record 12 once; hi at each visit, but not at the one with the update, unless that runs in the backward pass
        reads = 12 + g + 2 * (visits if immediate else visits - 1)
        parked = 4 * (waves - 1)
        on_bus = {} if engine.config.grad_tier is Tier.device else {"h2d": parked, "d2h": parked}
        add(numel, nvme_read=reads, nvme_write=12 + g, h2d=2 * visits, d2h=2)
        add(numel, **on_bus)
        add(numel, **({"nvme_read": parked, "nvme_write": parked} if on_disk else {}))
    leftovers = sum(group.layout.padded_numel for group in engine.parts.leftovers.groups)
    g = 2 if on_disk and not immediate else 0
    # attached once a step: after an update in the backward pass they are read again, else they are in place
    add(leftovers, nvme_read=12 + g + (2 if immediate else 0), nvme_write=12 + g, h2d=2, d2h=2)
    return total


@pytest.mark.parametrize("accumulation", [1, 4, 16])
@pytest.mark.parametrize("wave", [None, 1])
@pytest.mark.parametrize("update", [{}, BACKWARD], ids=["clipped", "backward"])
@pytest.mark.parametrize("grad_tier", ["cpu", "nvme"])
def test_a_steady_step(accumulation, wave, update, grad_tier, tmp_path):
    config = EngineConfig(param_tier="nvme", state_tier="nvme", grad_tier=grad_tier, nvme_dir=str(tmp_path / "tiers"),
                          precision="bf16", wave=wave, **update)  # fmt: skip
    mbs = batches(accumulation, 1)[0]
    waves = accumulation if wave == 1 else 1
    with Engine(tiny_model("llama"), config) as engine:
        engine.step(mbs)
        steady = [engine.step(mbs).traffic for _ in range(2)]
        assert steady == [expected(engine, waves, bool(update))] * 2


def test_weight_traffic_does_not_grow_with_accumulation(tmp_path):
    """Not even by a byte; and the sums see a difference where there is one."""
    traffic = []
    for accumulation in (1, 16):
        config = EngineConfig(param_tier="nvme", state_tier="nvme", grad_tier="nvme", nvme_dir=str(tmp_path / "t"))
        with Engine(tiny_model("llama"), config) as engine:
            engine.step(batches(accumulation, 1)[0])
            traffic.append(engine.step(batches(accumulation, 1)[0]).traffic)
            assert expected(engine, 2, False) != traffic[-1]
    assert traffic[0] == traffic[1]


def test_on_the_device_nothing_moves():
    with Engine(tiny_model("llama"), EngineConfig()) as engine:
        for _ in range(2):
            assert set(engine.step(batches(2, 1)[0]).traffic.values()) == {0}
