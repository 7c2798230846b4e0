"""Answers before and after, for the report: of the base and of the export, by plain transformers.

The whole model has to fit into memory for this, which a run itself does not ask for: so it is off by default, and left
out, with a line that says so, where there is no room.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from zft.config import RunConfig
from zft.dist import World
from zft.models.answers import answer_ids, load_plain
from zft.observe.report import add_facts, write_report
from zft.train.folder import RunFolder
from zft.train.setup import together

MAX_NEW_TOKENS = 32
TEXT_PROMPT_TOKENS = 16
"""Of plain text, where every token is a target, this much is the prompt."""


def prompts(prepared: Any, count: int) -> list[list[int]]:
    """Token ids up to the first target of the first `count` sequences, of the held-out ones if there are any."""
    epochs = (prepared.eval or prepared).epochs
    found = []
    for sequence in sorted(epochs.items.members.tolist()):
        ids, mask = epochs.store.ids(sequence), epochs.store.mask(sequence)
        first = int(mask.argmax())
        # a document's first token is no target, so that a mask from 1 on is plain text
        kept = ids[: first if first > 1 else min(TEXT_PROMPT_TOKENS, len(ids) // 2)]
        if len(kept) and kept.tolist() not in found:
            found.append(kept.tolist())
        if len(found) == count:
            break
    return found


def keep_samples(run: RunConfig, base: Path, prepared: Any, tokenizer: Any, world: World) -> None:
    """Answer `run.samples` prompts of the data with the base and with the export; add them to the run's report.

    Rank 0's work; collective, unless none are asked for.
    """
    if run.samples:
        with together(world):
            if world.is_main:
                _keep(run, base, prepared, tokenizer)


def _keep(run: RunConfig, base: Path, prepared: Any, tokenizer: Any) -> None:
    asked, folder = prompts(prepared, run.samples), RunFolder(run.out)
    needed, free = _bytes_of(base), _free_bytes()
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
        print(f"samples={run.samples}: left out, the whole model needs {sizes}", flush=True)
        return
    before, after = (_answers(where, asked, run, prepared.stop_ids, tokenizer) for where in (base, folder.export))
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in asked]
    rows = zip(texts, before, after, strict=True)
    add_facts(folder.path, samples=[{"prompt": text, "before": old, "after": new} for text, old, new in rows])
    write_report(folder.path)


def _answers(where: Path, asked: list[list[int]], run: RunConfig, stop_ids: list[int], tokenizer: Any) -> list[str]:
    model = load_plain(where, run.trust_remote_code)
    rows = max(map(max, asked), default=-1) + 1
    if rows > model.get_input_embeddings().weight.shape[0]:  # the base does not know tokens that the run adds
        model.resize_token_embeddings(rows)
    found = [answer_ids(model, torch.tensor([ids]), MAX_NEW_TOKENS, stop_ids) for ids in asked]
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in found]


def _bytes_of(folder: Path) -> int:
    """Of the weights, as load_plain holds them: a CPU widens 2-byte weights to float32."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return stored if torch.cuda.is_available() else 2 * stored


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
