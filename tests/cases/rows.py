"""For cases that start from a data file: conversations, and what a loader makes of them."""

from __future__ import annotations

import json
from pathlib import Path


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(prompt: str = "the a", answer: str = "of and") -> dict:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def sizes(loader) -> list[int]:
    """Micro-batches of each step."""
    out = []
    while (step := loader.next_step()) is not None:
        out.append(len(step))
    return out
