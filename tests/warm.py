"""Imported once by the server that ranks are forked from: loads libraries and compiled kernels. Starts no threads."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

import tests.tiny  # noqa: E402,F401
import zft.api  # noqa: E402,F401
from zft.config import SGD, AdamW, EngineConfig, Lion  # noqa: E402
from zft.optim.norm import sumsq_blocks  # noqa: E402
from zft.optim.rules import Hyper, Segments, make_rule  # noqa: E402
from zft.precision import resolve_precision  # noqa: E402


def load_kernels() -> None:
    """Run every kernel once, so that the forked ranks find them loaded."""
    optims = (AdamW(), SGD(), Lion(), AdamW(compact=True))
    for precision in ("bf16", "fp16", "fp32"):
        for optim in optims if precision == "bf16" else optims[:3]:
            rule = make_rule(optim, resolve_precision(EngineConfig(precision=precision, optim=optim), "cpu"))
            for dtype in (torch.bfloat16, torch.float32):
                views = {f.name: torch.zeros(f.entries(256), dtype=f.dtype) for f in rule.fields}
                rule.update(views, torch.zeros(256, dtype=dtype), Segments.whole(256), Hyper(1, 1e-3))
    for dtype in (torch.bfloat16, torch.float32):
        sumsq_blocks(torch.zeros(256, dtype=dtype))


torch.set_num_threads(1)
load_kernels()
