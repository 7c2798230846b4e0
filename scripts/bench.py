"""Measures zft beside a plain loop, FSDP2, DeepSpeed and TRL: the same model and tokens, one process each, in turns.

    python scripts/bench.py step --model 135m [--steps 3] [--rounds 2] [--only zft-nvme,ds-cpu] [--peers-python PYTHON]
    python scripts/bench.py step --model 1b1 --tokens 256
    python scripts/bench.py update | load | export --model 135m [--only ds-cpu: beside DeepSpeed's]
    python scripts/bench.py data --model FOLDER --rows FILE

`--model` is a shape of scripts/make_shape.py (random weights, made once in --work) or a folder. `--peers-python` is the
interpreter of an environment with DeepSpeed 0.19.8 and TRL (see scripts/peers.sh). Memory is the kernel's figure for the
process tree, disk bytes are its counters. A peer that fails is shown with its error. Results: scripts/results/.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from measure import ROOT, Watched, caption, circumstances, watch, write_result

PEERS = {
    # name: (script, variant, whose interpreter, what it is)
    "zft-nvme": ("zft_peer.py", "nvme", "own", "zft, everything on NVMe"),
    "zft-nvme-immediate": ("zft_peer.py", "nvme-immediate", "own", "zft, everything on NVMe, no clipping"),
    "zft-nvme-offload": ("zft_peer.py", "nvme-offload", "own", "zft, everything and boundary activations on NVMe"),
    "zft-nvme-lora": ("zft_peer.py", "nvme-lora", "own", "zft, LoRA (rank 16, all linear layers), everything on NVMe"),
    "zft-device": ("zft_peer.py", "device", "own", "zft, everything on the device"),
    "plain-fp32": ("plain_peer.py", "float32", "own", "plain loop, float32"),
    "plain-bf16": ("plain_peer.py", "bfloat16", "own", "plain loop, bfloat16 throughout"),
    "fsdp2": ("fsdp2_peer.py", "", "own", "FSDP2, one rank"),
    "ds-cpu": ("deepspeed_peer.py", "cpu", "peers", "DeepSpeed ZeRO-3, offloaded to host memory"),
    "ds-cpu-fp32": ("deepspeed_peer.py", "cpu-float32", "peers", "DeepSpeed ZeRO-3, offloaded to host memory, float32"),
    "ds-nvme-optimizer": ("deepspeed_peer.py", "nvme-optimizer", "peers", "DeepSpeed ZeRO-3, optimizer on NVMe"),
    "ds-nvme-optimizer-fp32": (
        "deepspeed_peer.py",
        "nvme-optimizer-float32",
        "peers",
        "DeepSpeed ZeRO-3, optimizer on NVMe, float32",
    ),
    "ds-nvme-all": ("deepspeed_peer.py", "nvme-all", "peers", "DeepSpeed ZeRO-3, parameters and optimizer on NVMe"),
    "trl": ("trl_peer.py", "", "peers", "TRL SFTTrainer, float32"),
}
LIMITED = ("zft-nvme", "zft-nvme-immediate", "zft-nvme-offload")
"""Peers that compute what zft-device computes, so that its phases are theirs without a disk."""
PLAIN_COPY = "a plain copy of as many bytes"
TOKENS = {"135m": 512, "1b1": 256}


def main() -> int:
    options = parsed()
    if options.mode == "data":
        return watch_data(options)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench-") as inside:
        options.inside = Path(inside)
        return {"step": steps, "update": update, "load": load, "export": export}[options.mode](options)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("step", "update", "load", "export", "data"))
    parser.add_argument("--model", default="135m")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a process")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="processes of each peer, in turns")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, help="of a micro-batch")
    parser.add_argument("--only", default=",".join(PEERS), help="peers, by name, with commas")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--gpu-memory", help="as 24GiB: what each process may take of the GPU")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure"
    )
    parser.add_argument("--rows", type=Path, help="data: a file of instructions")
    parser.add_argument("--name", help="of the result; MODE-MODEL unless given")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one process")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(PEERS)
    if unknown:
        parser.error(f"--only knows {', '.join(PEERS)}, got {', '.join(unknown)}")
    options.tokens = options.tokens or TOKENS.get(options.model, 512)
    options.work = options.work.resolve()
    options.name = options.name or f"{options.mode}-{Path(options.model).name}"
    return options


def folder_of(options: argparse.Namespace) -> Path:
    """The model's folder; a shape is made once and stays in --work."""
    if Path(options.model).is_dir():
        return Path(options.model).resolve()
    target = options.work / f"shape-{options.model}"
    if not (target / "config.json").is_file():
        from make_shape import make

        make(options.model, target)
    return target


def command_line() -> str:
    """What was typed, without folders of this machine."""
    words, skip = ["python scripts/bench.py"], False
    for word in sys.argv[1:]:
        if skip or word in ("--work", "--peers-python"):
            skip = not skip
            continue
        words.append(Path(word).name if "/" in word else word)
    return " ".join(words)


# steps


def peer_process(name: str, model: Path, options: argparse.Namespace) -> Watched:
    """One process of one peer, with a work folder of its own."""
    script, variant, whose, _ = PEERS[name]
    python = sys.executable if whose == "own" else options.peers_python
    work = options.inside / name
    work.mkdir(exist_ok=True)
    command = [python, f"scripts/bench_peers/{script}", "--model", str(model), "--work", str(work)]
    for key in ("steps", "warmup", "micro_batches", "tokens"):
        command += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    if variant:
        command += ["--variant", variant]
    if options.gpu_memory:
        command += ["--gpu-memory", options.gpu_memory.removesuffix("GiB")]
    env = {"PATH": f"{Path(python).parent}:{_path()}", "TOKENIZERS_PARALLELISM": "false"}
    try:
        return watch(command, work, options.timeout, env)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _path() -> str:
    import os

    return os.environ.get("PATH", "")


def steps(options: argparse.Namespace) -> int:
    """Step time, memory and disk bytes of every peer."""
    model, facts = folder_of(options), circumstances(options.peers_python)
    runs: dict[str, list[Watched]] = {name: [] for name in PEERS if name in options.only.split(",")}
    disk = [disk_rates(options)]
    for turn in range(options.rounds):
        for name, done in runs.items():
            if done and done[-1].error:
                continue
            print(f"round {turn + 1}: {name} …", flush=True)
            done.append(peer_process(name, model, options))
            last = done[-1]
            seconds = ", ".join(f"{row['seconds']:.2f}" for row in last.steps)
            print(f"    {last.error or seconds + ' s'}; {last.peak_bytes / 2**30:.2f} GiB", flush=True)
        disk.append(disk_rates(options))
    rows = [step_row(name, done) for name, done in runs.items()]
    limits = machine_limits({name: done for name, done in runs.items() if not any(each.error for each in done)}, disk)
    base = next((row for row in rows if row["peer"] == "zft-nvme" and not row["error"]), None)
    for row in rows:
        if base and not row["error"]:
            row["time_ratio"] = base["step_s"] / row["step_s"]
            row["memory_ratio"] = base["peak_bytes"] / row["peak_bytes"]
    shape = f"{options.micro_batches} × {options.tokens} tokens a step"
    result = {
        **facts,
        "command": command_line(),
        "model": options.model,
        "rows": rows,
        "disk_rates": disk,
        "limits": limits,
    }
    path = write_result(options.name, result, step_table(rows, facts, shape, options) + limits_table(limits))
    print(path.read_text(encoding="utf-8"))
    return 0


def step_row(name: str, done: list[Watched]) -> dict:
    """The median over all timed steps of all rounds; memory is the highest."""
    errors = [each.error for each in done if each.error]
    row = {
        "peer": name,
        "what": PEERS[name][3],
        "error": errors[0] if errors else "",
        "peak_bytes": max(e.peak_bytes for e in done),
    }
    taken = [step for each in done for step in each.steps]
    if taken and not errors:
        parameters = next(r["parameters"] for r in done[0].rows if r.get("event") == "ready")
        row |= {
            "step_s": statistics.median(step["seconds"] for step in taken),
            "all_s": [step["seconds"] for step in taken],
            "parameters": parameters,
            "disk_read": statistics.median(step["disk"]["read"] for step in taken) / parameters,
            "disk_written": statistics.median(step["disk"]["write"] for step in taken) / parameters,
            "device_bytes": max(step["device"] for step in taken),
            "loss": taken[-1]["loss"],
            "files_bytes": max(each.folder_bytes for each in done),
        }
    return row


def disk_rates(options: argparse.Namespace) -> dict[str, float]:
    """Bytes a second of the engine's own reads and writes with nothing beside them, in the folder that the peers use."""
    from zft.plan.probe import nvme_rates

    return nvme_rates(options.inside)


def machine_limits(runs: dict[str, list[Watched]], disk: list[dict]) -> list[dict]:
    """For zft's runs on NVMe: the larger, per phase, of compute (the run on the device) and disk (its bytes at its rate)."""
    if not (device := [step for each in runs.get("zft-device", []) for step in each.steps]):
        return []
    read, write = (statistics.median(rates[key] for rates in disk) for key in ("read", "write"))
    limits = []
    for name in (name for name in runs if name in LIMITED):
        row = {"peer": name, "what": PEERS[name][3], "step_s": 0.0, "limit_s": 0.0}
        for phase in ("forward", "backward"):
            mine = [step[phase] for each in runs[name] for step in each.steps]
            compute_s = statistics.median(step[phase]["seconds"] for step in device)
            disk_s = statistics.median(step["nvme_read"] / read + step["nvme_write"] / write for step in mine)
            seconds = statistics.median(step["seconds"] for step in mine)
            row[phase] = {"seconds": seconds, "compute_s": compute_s, "disk_s": disk_s}
            row["step_s"] += seconds
            row["limit_s"] += max(compute_s, disk_s)
        limits.append(row)
    return limits


def limits_table(limits: list[dict]) -> str:
    if not limits:
        return ""
    lines = [
        "", "", "**Against the machine**: compute is the same phase with everything on the device, disk the phase's bytes at the",
        "rate of the disk alone; forward holds the clipped updates.", "",
        "| | forward: took, compute, disk s | backward: took, compute, disk s | step / limit |", "|---|---:|---:|---:|",
    ]  # fmt: skip
    for row in limits:
        cells = [
            ", ".join(f"{row[phase][key]:.1f}" for key in ("seconds", "compute_s", "disk_s"))
            for phase in ("forward", "backward")
        ]
        lines.append(f"| {row['what']} | {cells[0]} | {cells[1]} | {row['step_s'] / row['limit_s']:.2f} |")
    return "\n".join(lines)


def step_table(rows: list[dict], facts: dict, shape: str, options: argparse.Namespace) -> str:
    lines = [
        f"**{options.model}, {shape}** (ratios: zft on NVMe to the row; lower is better)", "",
        "| | step s | peak resident GiB | disk read B/param | written | time ratio | memory ratio |", "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in rows:
        if row["error"]:
            lines.append(f"| {row['what']} | failed: {row['error'].replace('|', '/')} | | | | | |")
            continue
        ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("time_ratio", "memory_ratio")]
        lines.append(
            f"| {row['what']} | {row['step_s']:.1f} | {row['peak_bytes'] / 2**30:.2f} | {row['disk_read']:.1f} | "
            f"{row['disk_written']:.1f} | {ratios[0]} | {ratios[1]} |"
        )
    return "\n".join([*lines, "", caption(facts, command_line())])


# update, load, export, data


def update(options: argparse.Namespace) -> int:
    """Bytes a second of the update beside a plain copy, in turns, in this process."""
    from zft.plan.probe import copy_rate, update_rate

    facts, rows = circumstances(), []
    for _ in range(max(options.rounds, 5)):
        rows.append({"copy": copy_rate(1.0, 1 << 30), "update": update_rate(1.0, 44_000_000)})
    copy, done = (statistics.median(row[key] for row in rows) for key in ("copy", "update"))
    text = (
        f"**The update**: {done / 1e9:.1f} GB/s read and written ({done / 26 / 1e9:.2f} G parameters/s at 26 bytes); a plain copy: "
        f"{copy / 1e9:.1f} GB/s; ratio {done / copy:.2f}\n\n{caption(facts, command_line())}"
    )
    write_result("update", {**facts, "command": command_line(), "rows": rows, "ratio": done / copy}, text)
    print(text)
    return 0


def load(options: argparse.Namespace) -> int:
    """From a folder of weights to a model that can train: seconds and peak memory."""
    model, facts = folder_of(options), circumstances()
    return compare(options, facts, "loading", {
        "zft, everything on NVMe": [sys.executable, "scripts/bench_peers/load_peer.py", str(model), "nvme", str(options.inside)],
        "zft, everything on the device": [sys.executable, "scripts/bench_peers/load_peer.py", str(model), "device", str(options.inside)],
        "transformers from_pretrained, bf16": [sys.executable, "scripts/bench_peers/load_peer.py", str(model), "transformers", "."],
    })  # fmt: skip


def export(options: argparse.Namespace) -> int:
    """A trained state to a Hub folder: zft's run and checkpoint, DeepSpeed's zero_to_fp32.py, and a copy of the bytes."""
    model, facts = folder_of(options), circumstances(options.peers_python)
    ours, theirs, out = options.inside / "zft-checkpoint", options.inside / "ds-checkpoint", options.inside / "out"
    peer = [sys.executable, "scripts/bench_peers/export_peer.py"]
    made = watch([*peer, "save", str(model), str(ours)])
    if made.error:
        sys.exit(f"zft could not save: {made.error}")
    commands = {
        "zft, from a run on NVMe": [*peer, "run", str(model), str(out)],
        "zft, from a checkpoint": [*peer, "checkpoint", str(model), str(ours), str(out)],
        PLAIN_COPY: [*peer, "copy", str(model), str(out)],
    }
    saved = None
    if "ds-cpu" in options.only.split(","):
        saved = deepspeed_saved(model, theirs, options)
        script = theirs / "zero_to_fp32.py"
        commands["DeepSpeed zero_to_fp32.py"] = (
            [options.peers_python, str(script), str(theirs), str(out), "--safe_serialization"]
            if not saved.error
            else ["false"]
        )
    return compare(options, facts, "exporting what was trained", commands, saved.error if saved else "")


def deepspeed_saved(model: Path, target: Path, options: argparse.Namespace) -> Watched:
    """A checkpoint by DeepSpeed, after one small step."""
    work = options.inside / "ds"
    work.mkdir()
    command = [
        options.peers_python,
        "scripts/bench_peers/deepspeed_peer.py",
        "--model",
        str(model),
        "--work",
        str(work),
    ]
    command += ["--variant", "cpu-float32", "--steps", "1", "--warmup", "0", "--micro-batches", "1", "--tokens", "32"]
    return watch(command, env={"BENCH_SAVE": str(target), "PATH": f"{Path(options.peers_python).parent}:{_path()}"})


def compare(
    options: argparse.Namespace, facts: dict, what: str, commands: dict[str, list[str]], error: str = ""
) -> int:
    """Seconds and peak memory of whole processes, in turns."""
    runs: dict[str, list[Watched]] = {name: [] for name in commands}
    for _ in range(max(options.rounds, 1)):
        for name, command in commands.items():
            shutil.rmtree(options.inside / "out", ignore_errors=True)
            runs[name].append(watch(command, timeout_s=options.timeout))
    rows = []
    for name, done in runs.items():
        failed = next((each.error for each in done if each.error), "")
        inside = [row for each in done for row in each.rows if row.get("event") == "done"]
        rows.append({"peer": name, "error": (error or failed) if failed else "", "seconds": statistics.median(e.seconds for e in done),
                     "inside_s": statistics.median(row["seconds"] for row in inside) if inside else None,
                     "inside_bytes": max((row.get("peak_bytes", 0) for row in inside), default=0),
                     "peak_bytes": max(e.peak_bytes for e in done)})  # fmt: skip
    copy = next((row["inside_s"] for row in rows if row["peer"] == PLAIN_COPY), None)
    lines = [
        f"**{options.model}, {what}** (the whole process with imports, then the work alone)", "",
        "| | seconds | of these the work | times the copy | peak resident GiB | of the work |", "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in rows:
        inside = row["inside_s"]
        alone, times = f"{inside:.1f}" if inside else "", f"{inside / copy:.2f}" if inside and copy else ""
        work_gib = f"{row['inside_bytes'] / 2**30:.2f}" if row["inside_bytes"] else ""
        cells = f"{row['seconds']:.1f} | {alone} | {times} | {row['peak_bytes'] / 2**30:.2f} | {work_gib}"
        lines.append(f"| {row['peer']} | {'failed: ' + row['error'] + ' | | | |' if row['error'] else cells} |")
    path = write_result(
        options.name,
        {**facts, "command": command_line(), "rows": rows},
        "\n".join([*lines, "", caption(facts, command_line())]),
    )
    print(path.read_text(encoding="utf-8"))
    return 0


def watch_data(options: argparse.Namespace) -> int:
    """scripts/bench_data.py, in the environment that has TRL."""
    if options.rows is None or not Path(options.model).is_dir():
        sys.exit("data needs --model FOLDER (with a tokenizer) and --rows FILE")
    import subprocess

    return subprocess.run(
        [options.peers_python, "scripts/bench_data.py", options.model, str(options.rows)], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
