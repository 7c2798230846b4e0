"""The engine's spans by lane: an update is its arithmetic only, and its reads and writes show as NVMe transfers."""

from __future__ import annotations

import time

import pytest

from tests.toy import Toy, square_loss, toy_batches, toy_config
from zft.api import Engine

NVME = {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"}
GROUPS = {f"{unit}#0" for unit in ("embed", "layers.0", "layers.1", "layers.2", "leftovers")}
SLOW_S = 0.05


def spans_of(folder, slow: bool = False, **settings) -> list[tuple[str, str, float]]:
    """(lane, name, seconds) of a steady step on the CPU."""
    spans = []
    config = toy_config(nvme_dir=str(folder / "tiers"), **settings)
    with Engine(Toy(), config, record=lambda lane, name, start, end: spans.append((lane, name, end - start))) as engine:
        for number, mbs in enumerate(toy_batches(2, 3)):
            if slow and number == 2:
                for name in ("_preadv", "_pwritev"):
                    setattr(engine.parts.folder, name, late(getattr(engine.parts.folder, name)))
            spans.clear()
            engine.step(mbs, loss_fn=square_loss)
        return list(spans)


def late(call):
    def called(*args):
        time.sleep(SLOW_S)
        return call(*args)

    return called


def names(spans: list, lane: str) -> set[str]:
    return {name for where, name, _ in spans if where == lane}


@pytest.mark.parametrize("update", [{}, {"max_grad_norm": None, "nonfinite": "raise"}], ids=["forward", "backward"])
def test_waiting_for_the_disk_is_not_updating(update, tmp_path):
    spans = spans_of(tmp_path, slow=True, **NVME, **update)
    for lane in ("nvme read", "nvme write"):
        assert names(spans, lane) == GROUPS and all(s >= SLOW_S for where, _, s in spans if where == lane)
    updates = sorted(seconds for lane, _, seconds in spans if lane == "update")
    assert names(spans, "update") == GROUPS and updates[len(updates) // 2] < SLOW_S / 2
    assert {lane for lane, _, _ in spans} == {"compute", "update", "d2h", "nvme read", "nvme write"}


@pytest.mark.parametrize(("tier", "waves", "expected"), [
    ("device", 1, []), ("cpu", 1, ["gradient"]), ("nvme", 1, ["gradient"]),
    ("device", 2, []), ("cpu", 2, ["gradient", "partial gradient"]), ("nvme", 2, ["gradient", "partial gradient"]),
])  # fmt: skip
def test_gradients_that_leave_the_device_show(tier, waves, expected, tmp_path):
    spans = spans_of(tmp_path, grad_tier=tier, wave=2 // waves)
    moved = {f"{kind} {group}" for kind in expected for group in GROUPS}
    # the leftovers' gradients add up on the device over all waves
    assert names(spans, "d2h") == moved - {"partial gradient leftovers#0"}


def test_boundary_activations_that_leave_the_device_show(tmp_path):
    spans = spans_of(tmp_path, activation="offload", activation_tier="nvme")
    assert names(spans, "d2h") == {"activations"}
    assert names(spans, "nvme write") == names(spans, "nvme read") == {"activations-0"}


def test_everything_on_the_device_moves_nothing(tmp_path):
    assert {lane for lane, _, _ in spans_of(tmp_path)} == {"compute", "update"}
