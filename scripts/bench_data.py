"""Tokenizing and packing a file of instructions: zft beside TRL, the same rows, in one run.

    python scripts/bench_data.py MODEL_FOLDER alpaca.json [rows]

Both read the rows from memory or file as they do, render the chat template, tokenize, mask the prompt and pack to 2048
tokens. TRL's share is the time of SFTTrainer's own dataset preparation; its model is random and tiny. Neither uses a
cache. Needs `trl` and `accelerate`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from zft.data import DataOptions, prepare  # noqa: E402

SEQ_LEN = 2048
ROUNDS = 3


def zft_seconds(rows: list[dict], tokenizer, folder: Path) -> tuple[float, int, int]:
    """(seconds, tokens, supervised tokens)."""
    path = folder / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    start = time.perf_counter()
    report = prepare(str(path), tokenizer, DataOptions(pack=True), seq_len=SEQ_LEN).report
    return time.perf_counter() - start, report.tokens, report.supervised_tokens


def trl_seconds(rows: list[dict], tokenizer, folder: Path) -> tuple[float, int, int]:
    """(seconds, tokens, supervised tokens)."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_caching()
    datasets.disable_progress_bars()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    data = datasets.Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": "\n".join(filter(None, (r["instruction"], r["input"])))}],
                "completion": [{"role": "assistant", "content": r["output"]}],
            }
            for r in rows
        ]
    )
    seconds = []

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *args, **kwargs):
            start = time.perf_counter()
            done = super()._prepare_dataset(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return done

    options = SFTConfig(
        output_dir=str(folder / "trl"), packing=True, max_length=SEQ_LEN, report_to=[], use_cpu=True, bf16=False,
        padding_free=True,
    )  # fmt: skip
    trainer = Timed(LlamaForCausalLM(config), options, train_dataset=data, processing_class=tokenizer)
    packs = trainer.train_dataset
    masks = (
        packs["completion_mask"]
        if "completion_mask" in packs.column_names
        else [[label != -100 for label in row] for row in packs["labels"]]
    )
    return seconds[0], sum(map(len, packs["input_ids"])), sum(map(sum, masks))


def main() -> None:
    folder, file = sys.argv[1:3]
    rows = json.loads(Path(file).read_text(encoding="utf-8"))
    rows = rows[: int(sys.argv[3]) if len(sys.argv) > 3 else 1000]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(f"{len(rows)} rows, packed to {SEQ_LEN}, best of {ROUNDS}")
    for name, measure in (("zft", zft_seconds), ("trl", trl_seconds)):
        with tempfile.TemporaryDirectory() as place:
            measure(rows[:8], tokenizer, Path(place))  # imports, compiled templates
            runs = [measure(rows, tokenizer, Path(place)) for _ in range(ROUNDS)]
        seconds = min(run[0] for run in runs)
        print(f"{name}: {seconds:6.2f} s  {runs[0][1]:,} tokens, {runs[0][2]:,} supervised")


if __name__ == "__main__":
    main()
