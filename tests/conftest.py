"""Shared by all tests: one thread for each process, so that parallel tests and bitwise comparisons behave."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
