"""zft. Variants: nvme, device, nvme-immediate, nvme-offload, nvme-lora, or fields of EngineConfig as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from common import arguments, fresh, micro_batches, run_steps  # noqa: E402

from zft.api import Engine, EngineConfig  # noqa: E402
from zft.config import Method, MethodConfig  # noqa: E402

VARIANTS: dict[str, dict] = {
    "nvme": {},
    "device": dict.fromkeys(("param_tier", "state_tier", "grad_tier"), "device"),
    "nvme-immediate": {"max_grad_norm": None, "nonfinite": "raise"},
    "nvme-offload": {"activation": "offload", "activation_tier": "nvme"},
    "nvme-lora": {},
}


class Phases:
    """Seconds and NVMe bytes of a step's forward phase (which holds the clipped updates) and of its backward phase."""

    def __init__(self) -> None:
        self.found: dict = {}
        self.traffic = None

    def begin(self) -> None:
        self.started = self.turned = time.perf_counter()
        self.at_turn = dict.fromkeys(("nvme_read", "nvme_write"), 0)

    def record(self, lane: str, name: str, _start_s: float, end_s: float) -> None:
        """The engine's `record=`: the last forward visit ends the phase."""
        if lane == "compute" and name.startswith("forward ") and self.traffic is not None:
            self.turned, self.at_turn = end_s, self.traffic.snapshot()

    def end(self, whole: dict[str, int]) -> None:
        ended = time.perf_counter()
        forward = {key: self.at_turn[key] for key in ("nvme_read", "nvme_write")}
        self.found = {
            "forward": {"seconds": self.turned - self.started, **forward},
            "backward": {"seconds": ended - self.turned, **{key: whole[key] - count for key, count in forward.items()}},
        }


def main() -> None:
    options = arguments()
    settings = dict.fromkeys(("param_tier", "state_tier", "grad_tier"), "nvme") | {
        "nvme_dir": fresh(options.work / "zft")
    }
    settings |= json.loads(options.variant) if options.variant.startswith("{") else VARIANTS[options.variant]
    batches = micro_batches(options)
    method = MethodConfig(Method.lora if options.variant == "nvme-lora" else Method.full)
    phases = Phases()
    with Engine.from_pretrained(options.model, EngineConfig(**settings), record=phases.record, method=method) as engine:
        phases.traffic = engine.parts.traffic
        parameters = sum(p.numel() for p in engine.model.parameters())

        def step() -> float:
            phases.begin()
            result = engine.step(batches, lr=1e-5)
            phases.end(result.traffic)
            return result.loss

        run_steps(options, step, parameters, lambda: phases.found)


main()
