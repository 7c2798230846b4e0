"""Runs a process and watches it from outside: peak resident memory of its tree, files on disk, its lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # zft is this checkout's, for this script and those that import it


@dataclass
class Watched:
    """What a process did. Bytes are the kernel's figures."""

    status: int
    rows: list[dict] = field(default_factory=list)
    """Its lines of JSON."""
    peak_bytes: int = 0
    """Resident, summed over the process tree (proportional shares of pages that several of its processes map)."""
    folder_bytes: int = 0
    """Largest size of the files in the watched folder."""
    seconds: float = 0.0
    error: str = ""

    @property
    def steps(self) -> list[dict]:
        return [row for row in self.rows if row.get("event") == "step" and not row["warmup"]]


def watch(command: list[str], folder: Path | None = None, timeout_s: float = 3600, env: dict | None = None) -> Watched:
    """Run `command` to its end. folder: its files' allocated size is sampled, too."""
    made = Watched(-1)
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}, cwd=ROOT
    )
    errors: list[str] = []
    readers = [
        threading.Thread(target=lambda: made.rows.extend(_json_rows(process.stdout)), daemon=True),
        threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        while process.poll() is None:
            made.peak_bytes = max(made.peak_bytes, tree_bytes(process.pid))
            if folder is not None:
                made.folder_bytes = max(made.folder_bytes, allocated_bytes(folder))
            if time.perf_counter() - started > timeout_s:
                errors.append(f"stopped after {timeout_s:.0f} s")
                break
            time.sleep(0.1)
    finally:
        _end(process)
    for reader in readers:
        reader.join(timeout=10)
    made.status, made.seconds = process.returncode, time.perf_counter() - started
    made.error = "" if process.returncode == 0 else last_error(errors)
    if process.returncode < 0 and not made.error.startswith("stopped after"):
        made.error = f"ended by signal {-process.returncode}" + " (out of memory?)" * (process.returncode == -9)
    return made


def _json_rows(stream):
    for line in stream:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _end(process: subprocess.Popen) -> None:
    """The process and what it started, by their ids."""
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
    process.wait()


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and its children: the highest so far of a lone one, else the sum of shares now."""
    with contextlib.suppress(psutil.Error, OSError):
        children = psutil.Process(pid).children(recursive=True)
        if not children:
            return _status(pid, "VmHWM")
        return sum(_share(each) for each in [pid, *(child.pid for child in children)])
    return 0


def _status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _share(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def allocated_bytes(folder: Path) -> int:
    """What the files in a folder take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                total += path.stat().st_blocks * 512
    return total


def last_error(lines: list[str]) -> str:
    """The line that says what went wrong, of a process's stderr."""
    rows = [line.strip() for line in lines if line.strip()]
    named = [row for row in rows if "Error" in row.split(":")[0] and ":" in row]
    return (named or rows or ["no message"])[-1][:300]


# what a result is shown with


def circumstances(python: str = sys.executable) -> dict:
    """Hardware, versions and commit, without names of machines or folders."""
    from zft.plan.probe import processor

    names = ("torch", "transformers", "deepspeed", "trl", "accelerate", "numba")
    code = "import importlib.metadata as m, json, sys\nprint(json.dumps({n: m.version(n) for n in sys.argv[1:] if _has(n)}))"
    code = "import importlib.util\ndef _has(n): return importlib.util.find_spec(n) is not None\n" + code
    versions = {sys.executable: {}, python: {}}
    for each in versions:
        out = subprocess.run([each, "-c", code, *names], capture_output=True, text=True, check=False).stdout
        with contextlib.suppress(ValueError):
            versions[each] = json.loads(out)
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "versions": versions[python] | versions[sys.executable],
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def commit() -> str:
    """The commit, with a + where tracked files differ from it."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def write_result(name: str, result: dict, markdown: str) -> Path:
    """scripts/results/NAME.json, and readme-NAME.md from which scripts/readme.py fills the README."""
    folder = ROOT / "scripts" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path = folder / f"readme-{name}.md"
    path.write_text(markdown + "\n", encoding="utf-8")
    return path


def caption(facts: dict, command: str) -> str:
    """One line under a table."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    where = facts["gpu"] or f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB"
    return f"{where}; {versions}; commit {facts['commit']}, {facts['date']}; `{command}`"
