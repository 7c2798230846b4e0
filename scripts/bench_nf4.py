"""Quantizing to NF4 and back on this CPU: zft's kernels beside bitsandbytes and torchao, where they are installed.

    python scripts/bench_nf4.py

Prints millions of elements a second (best of five) and the number of codes that differ from zft's.
"""

from __future__ import annotations

import importlib.util
import platform
import time
from collections.abc import Callable

import torch

from zft.models.nf4 import NF4

SHAPE = (2048, 5632)


def rate(action: Callable[[], object], numel: int) -> float:
    action()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return numel / best / 1e6


def main() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(SHAPE) * 0.02).bfloat16()
    numel, flat = weight.numel(), weight.flatten()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':14}{'quantize':>10}{'dequantize':>12}   M elements/s, {SHAPE[0]} x {SHAPE[1]} bfloat16")
    blob, wide, narrow = torch.empty(NF4.nbytes(numel), dtype=torch.uint8), torch.empty(numel), torch.empty_like(flat)
    encode = rate(lambda: NF4.encode(flat, blob), numel)
    print(f"{'zft float32':14}{encode:10.0f}{rate(lambda: NF4.decode(blob, wide), numel):12.0f}")
    print(f"{'zft bfloat16':14}{encode:10.0f}{rate(lambda: NF4.decode(blob, narrow), numel):12.0f}")
    if importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes import functional

        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        encode = rate(lambda: functional.quantize_4bit(weight, blocksize=64, quant_type="nf4"), numel)
        decode = rate(lambda: functional.dequantize_4bit(codes, state), numel)
        differ = int((codes.view(-1) != blob[: numel // 2]).sum())
        print(f"{'bitsandbytes':14}{encode:10.0f}{decode:12.0f}   {differ} bytes of codes differ")
    if importlib.util.find_spec("torchao"):
        from torchao.quantization import to_nf4

        packed = to_nf4(weight, 64, 256)
        decode = rate(packed.get_original_weight, numel)
        print(f"{'torchao':14}{rate(lambda: to_nf4(weight, 64, 256), numel):10.0f}{decode:12.0f}   double quantization")


if __name__ == "__main__":
    main()
