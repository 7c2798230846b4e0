"""zft's side of the export: export_peer.py save MODEL CHECKPOINT, then export_peer.py export MODEL CHECKPOINT OUT."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402

from zft.api import Engine, EngineConfig  # noqa: E402


def main() -> None:
    verb, model, checkpoint = sys.argv[1:4]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=Path(checkpoint).parent) as nvme:
        config = EngineConfig(param_tier="nvme", state_tier="nvme", grad_tier="nvme", nvme_dir=nvme)
        with Engine.from_pretrained(model, config) as engine:
            if verb == "save":
                ids = torch.arange(5, 37).view(1, -1)
                engine.step([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}], lr=1e-5)
                engine.save(checkpoint)
            else:
                engine.load(checkpoint)
                engine.export(sys.argv[4])
    print(json.dumps({"event": "done", "seconds": time.perf_counter() - started}), flush=True)


main()
