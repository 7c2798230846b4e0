"""Worker processes: the same data for any number of them, errors in order, and memory that stays flat in real bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.data.tokenizers import bpe_tokenizer
from zft.config import ZftError
from zft.data import DataOptions, OnError, prepare

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def rows(count: int) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"the a of {n}"},
                {"role": "assistant", "content": "and to " * (n % 9 + 1)},
            ]
        }
        for n in range(count)
    ]


def write(path: Path, items: list) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def test_any_number_of_workers_gives_the_same(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    items = rows(300)
    items[77] = {"messages": []}
    path = write(tmp_path / "rows.jsonl", items)
    options = {"on_error": OnError.skip}
    alone = prepare(path, tokenizer, DataOptions(**options), seq_len=48)
    together = prepare(path, tokenizer, DataOptions(num_workers=2, **options), seq_len=48)
    assert alone.report.to_dict() == together.report.to_dict() and alone.report.rows == 299
    for name in ("_ids", "_mask", "ends", "rows"):
        assert (getattr(alone.epochs.store, name) == getattr(together.epochs.store, name)).all()
    assert alone.loader().state_dict() == together.loader().state_dict()
    with pytest.raises(ZftError, match="rows.jsonl:78: empty conversation"):
        prepare(path, tokenizer, DataOptions(num_workers=2), seq_len=48)
    one = write(tmp_path / "one.jsonl", rows(1))
    assert prepare(one, tokenizer, DataOptions(num_workers=10), seq_len=48).report.rows == 1


PROBE = """
import re, sys
from tests.fixtures.data.tokenizers import bpe_tokenizer
from zft.data import DataOptions, prepare

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

tokenizer = bpe_tokenizer("chatml")
prepare(sys.argv[1], tokenizer, DataOptions(max_rows=500), seq_len=64)
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted anew
before = status("VmRSS")
prepared = prepare(sys.argv[1], tokenizer, DataOptions(), seq_len=64)
loader = prepared.loader(0, 1, 8, 4, 1)
while loader.next_step() is not None:
    pass
print(prepared.report.rows, status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_resident_memory_stays_flat(tmp_path, kind):
    """16 MB of text leave an index, and the mapped pages of 256,000 tokens."""
    count, text = 4000, "the a of and to in that it was " * 130
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": [f"{n} {text}" for n in range(count)]})
        pyarrow.parquet.write_table(table, path, row_group_size=100, use_dictionary=False, compression=None)
    else:
        lines = [json.dumps({"text": f"{n} {text}"}) for n in range(count)]
        path.write_text("\n".join(lines) if kind == "jsonl" else "[" + ",".join(lines) + "]")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=400, check=True
    )
    read, grown_kib = map(int, done.stdout.split())
    assert read == count and path.stat().st_size > 15e6
    print(f"{kind}: {path.stat().st_size / 2**20:.0f} MiB of file, peak grew by {grown_kib / 1024:.1f} MiB")
    assert grown_kib < 12 * 1024
