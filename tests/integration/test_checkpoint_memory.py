"""Saving and loading stream: what they need beyond the engine does not grow with the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_ranks

BUFFERS = 40 << 20
"""Bytes; a chunk of a field is 4 MiB, and a few of them are under way."""


def peak_during(action) -> int:
    """Bytes by which resident memory rises above what it was, at most, while `action` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def save_and_load(folder: Path, tier: str) -> dict[str, int]:
    from tests.tiny import tiny_model
    from zft.api import Engine, EngineConfig, World

    # one parameter of 12.8 M elements: its record alone is 154 MB
    model = tiny_model("llama_tied", vocab_size=200_000, hidden_size=64, num_hidden_layers=1)
    tiers = {"param_tier": tier, "state_tier": tier, "grad_tier": tier}
    config = EngineConfig(compute_device="cpu", nvme_dir=str(folder / "nvme"), **tiers)
    with Engine(model, config, world=World.single("cpu")) as engine:
        rises = {
            "save": peak_during(lambda: engine.save(folder / "a")),
            "load": peak_during(lambda: engine.load(folder / "a")),
        }
        record = sum(path.stat().st_size for path in (folder / "a").iterdir())
        return rises | {"record": record}


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_memory_of_save_and_load_is_bounded(tmp_path, tier):
    [found] = run_ranks(1, save_and_load, tmp_path, tier)
    assert found["record"] > 140 << 20
    assert found["save"] < BUFFERS, found
    assert found["load"] < BUFFERS + (found["record"] if tier == "cpu" else 0), found
