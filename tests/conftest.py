"""Shared by all tests: one thread for each process, so that parallel tests and bitwise comparisons behave."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (bfloat16, tokenizer, chat template), kept in the cache; fails if it can't be had."""
    command = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "quickstart_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])
