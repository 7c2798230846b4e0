"""Loads a folder: load_peer.py MODEL nvme|device|transformers WORK."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]


def main() -> None:
    model, how, work = sys.argv[1:4]
    started = time.perf_counter()
    if how == "transformers":
        import torch
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        # the file's pages are mapped; training would touch them all
        sum(float(p.sum()) for p in loaded.parameters())
    else:
        from zft.api import Engine, EngineConfig

        tiers = {"param_tier": how, "state_tier": how, "grad_tier": how, "nvme_dir": work}
        Engine.from_pretrained(model, EngineConfig(**tiers)).close()
    print(json.dumps({"event": "done", "seconds": time.perf_counter() - started}), flush=True)


main()
