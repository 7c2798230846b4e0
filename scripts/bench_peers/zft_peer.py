"""zft. Variants: nvme, device, nvme-immediate, nvme-offload, or fields of EngineConfig as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from common import arguments, fresh, micro_batches, run_steps  # noqa: E402

from zft.api import Engine, EngineConfig  # noqa: E402


VARIANTS: dict[str, dict] = {
    "nvme": {},
    "device": dict.fromkeys(("param_tier", "state_tier", "grad_tier"), "device"),
    "nvme-immediate": {"max_grad_norm": None, "nonfinite": "raise"},
    "nvme-offload": {"activation": "offload", "activation_tier": "nvme"},
}


def main() -> None:
    options = arguments()
    settings = dict.fromkeys(("param_tier", "state_tier", "grad_tier"), "nvme") | {"nvme_dir": fresh(options.work / "zft")}
    settings |= json.loads(options.variant) if options.variant.startswith("{") else VARIANTS[options.variant]
    batches = micro_batches(options)
    with Engine.from_pretrained(options.model, EngineConfig(**settings)) as engine:
        parameters = sum(p.numel() for p in engine.model.parameters())
        run_steps(options, lambda: engine.step(batches, lr=1e-5).loss, parameters)


main()
