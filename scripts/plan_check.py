"""The plan beside the kernel's figures: every placement times every shape, each in a process of its own.

    python scripts/plan_check.py [--work FOLDER] [--steps 3] [--only-shape 135m] [--only-placement nvme]

Prints every cell: peak resident memory of the process tree, files on the disk and the median step time, planned and
measured. Memory is to be within 10 %, the step within 25 %. Run `zft doctor --nvme-dir FOLDER` on the quiet machine before.
Exits with 1 if a cell failed or is outside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from make_shape import make
from measure import Watched, caption, circumstances, watch, write_result

from zft.api import checked
from zft.config import EngineConfig, Tier
from zft.plan.here import rates_here
from zft.plan.memory import Batch, memory_of
from zft.plan.shapes import planned_world, shape_of
from zft.plan.step_time import time_of
from zft.precision import resolve_precision

SHAPES = {
    # name: (shape of make_shape.py, changed fields, micro-batches, tokens)
    "135m": ("135m", {}, 4, 256),
    "wide": ("1b1", {"num_hidden_layers": 4}, 4, 256),
    "long": ("135m", {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12,
                      "intermediate_size": 2048, "vocab_size": 32000, "tie_word_embeddings": False}, 2, 1024),
}  # fmt: skip


def tiers(param: str, state: str, grad: str, **more) -> dict:
    return {"param_tier": param, "state_tier": state, "grad_tier": grad, **more}


PLACEMENTS = {
    "device": tiers("device", "device", "device"),
    "state nvme": tiers("device", "nvme", "device"),
    "state, grad nvme": tiers("device", "nvme", "nvme"),
    "param nvme": tiers("nvme", "device", "device"),
    "param, state nvme": tiers("nvme", "nvme", "device"),
    "cpu, state nvme": tiers("cpu", "nvme", "cpu"),
    "nvme": tiers("nvme", "nvme", "nvme"),
    "nvme, no clipping": tiers("nvme", "nvme", "nvme", max_grad_norm=None, nonfinite="raise"),
    "nvme, wave 1": tiers("nvme", "nvme", "nvme", wave=1),
    "nvme, offload": tiers("nvme", "nvme", "nvme", activation="offload", activation_tier="nvme"),
    "device, keep graphs": tiers("device", "device", "device", activation="none"),
    "nvme, float32": tiers("nvme", "nvme", "nvme", precision="fp32"),
}
MEMORY_WITHIN, TIME_WITHIN = 0.10, 0.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only-shape", choices=SHAPES)
    parser.add_argument("--only-placement", choices=PLACEMENTS)
    parser.add_argument("--no-result", action="store_true", help="print only")
    options = parser.parse_args()
    facts, rows = circumstances(), []
    shapes = [options.only_shape] if options.only_shape else list(SHAPES)
    placements = [options.only_placement] if options.only_placement else list(PLACEMENTS)
    print(HEADER)
    for shape in shapes:
        for placement in placements:
            rows.append(cell(shape, placement, options))
            print(line(rows[-1]), flush=True)
    bad = [row for row in rows if row["error"] or not row["within"]]
    summary = f"{len(rows)} cells of {len(shapes) * len(placements)} run; {len(rows) - len(bad)} within 10 % (memory) and 25 % (time)"
    print(summary)
    if not options.no_result:
        command = "python scripts/plan_check.py"
        text = "\n".join(
            [
                "**Planned and measured**",
                "",
                MARKDOWN,
                *map(markdown, rows),
                "",
                f"{summary}. {caption(facts, command)}",
            ]
        )
        write_result("plan_check", {**facts, "command": command, "rows": rows}, text)
    return int(bool(bad))


def cell(shape: str, placement: str, options: argparse.Namespace) -> dict:
    """Plan one cell, run it, compare."""
    base, changed, micro_batches, tokens = SHAPES[shape]
    folder = options.work / f"shape-plan-{shape}"
    if not (folder / "config.json").is_file():
        make(base, folder, **changed)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="plan-") as work:
        settings = PLACEMENTS[placement]
        row = {"shape": shape, "placement": placement, **planned(folder, settings, (micro_batches, tokens), work)}
        command = [sys.executable, "scripts/bench_peers/zft_peer.py", "--model", str(folder), "--work", work, "--warmup", "2",
                   "--steps", str(options.steps), "--micro-batches", str(micro_batches), "--tokens", str(tokens),
                   "--variant", json.dumps(settings)]  # fmt: skip
        row |= measured(watch(command, Path(work)))
    ratios = {
        name: row[f"planned_{name}"] / row[f"measured_{name}"]
        for name in ("host", "nvme", "step_s")
        if row[f"measured_{name}"]
    }
    row["off"] = {name: ratio - 1 for name, ratio in ratios.items()}
    bounds = {"host": MEMORY_WITHIN, "nvme": MEMORY_WITHIN, "step_s": TIME_WITHIN}
    row["within"] = not row["error"] and all(abs(off) <= bounds[name] for name, off in row["off"].items())
    return row


def planned(folder: Path, settings: dict, steps: tuple[int, int], nvme_dir: str) -> dict:
    from zft.models.load import build_model

    config = checked(EngineConfig(nvme_dir=nvme_dir, **settings))
    plan = resolve_precision(config, "cpu")
    world = planned_world(1, None, "cpu")
    shape = shape_of(build_model(folder, plan.hi_dtype), config, world)
    batch, rates = Batch(1, steps[1], steps[0]), rates_here(nvme_dir, plan.compute_dtype)
    memory, time = memory_of(shape, config, world, batch), time_of(shape, config, world, batch, rates)
    return {"planned_host": memory.total(Tier.cpu), "planned_nvme": memory.total(Tier.nvme), "planned_step_s": time.seconds,
            "limit": time.limit, "items": memory.host, "busy": [time.forward.busy_s, time.backward.busy_s, time.edges_s]}  # fmt: skip


def measured(done: Watched) -> dict:
    seconds = [row["seconds"] for row in done.steps]
    return {"measured_host": done.peak_bytes, "measured_nvme": done.folder_bytes, "error": done.error,
            "measured_step_s": statistics.median(seconds) if seconds else 0.0}  # fmt: skip


HEADER = f"{'shape':6} {'placement':20} {'host GiB plan':>13} {'real':>6} {'':>5}  {'nvme GiB plan':>13} {'real':>6} {'':>5}  {'step s plan':>11} {'real':>6} {'':>5}  limit"
MARKDOWN = "| shape | placement | host GiB, planned | measured | nvme GiB, planned | measured | step s, planned | measured | |\n|---|---|--:|--:|--:|--:|--:|--:|---|"


def line(row: dict) -> str:
    if row["error"]:
        return f"{row['shape']:6} {row['placement']:20} failed: {row['error']}"
    off = {name: f"{row['off'][name]:+.0%}" if name in row["off"] else "" for name in ("host", "nvme", "step_s")}
    gib = 2**30
    return (
        f"{row['shape']:6} {row['placement']:20} {row['planned_host'] / gib:13.2f} {row['measured_host'] / gib:6.2f} {off['host']:>5}  "
        f"{row['planned_nvme'] / gib:13.2f} {row['measured_nvme'] / gib:6.2f} {off['nvme']:>5}  "
        f"{row['planned_step_s']:11.2f} {row['measured_step_s']:6.2f} {off['step_s']:>5}  {row['limit']}{'' if row['within'] else '  OUTSIDE'}"
    )


def markdown(row: dict) -> str:
    if row["error"]:
        return f"| {row['shape']} | {row['placement']} | failed: {row['error']} | | | | | | |"
    cells = [f"{row[f'{kind}_{name}'] / 2**30:.2f}" for name in ("host", "nvme") for kind in ("planned", "measured")]
    cells += [f"{row[f'{kind}_step_s']:.2f}" for kind in ("planned", "measured")]
    return f"| {row['shape']} | {row['placement']} | {' | '.join(cells)} | {'' if row['within'] else 'outside'} |"


if __name__ == "__main__":
    sys.exit(main())
