"""zft: everything on NVMe, or everything on the device. Variants: nvme, device, nvme-immediate, nvme-offload."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from common import arguments, fresh, micro_batches, run_steps  # noqa: E402

from zft.api import Engine, EngineConfig  # noqa: E402


def main() -> None:
    options = arguments()
    tier = "device" if options.variant == "device" else "nvme"
    settings = {"param_tier": tier, "state_tier": tier, "grad_tier": tier, "nvme_dir": fresh(options.work / "zft")}
    if options.variant == "nvme-immediate":
        settings |= {"max_grad_norm": None, "nonfinite": "raise"}
    if options.variant == "nvme-offload":
        settings |= {"activation": "offload", "activation_tier": "nvme"}
    batches = micro_batches(options)
    with Engine.from_pretrained(options.model, EngineConfig(**settings)) as engine:
        parameters = sum(p.numel() for p in engine.model.parameters())
        run_steps(options, lambda: engine.step(batches, lr=1e-5).loss, parameters)


main()
