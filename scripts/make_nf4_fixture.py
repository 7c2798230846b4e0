"""Writes tests/fixtures/nf4_bitsandbytes.safetensors: what bitsandbytes makes of two weights, for tests without it.

python scripts/make_nf4_fixture.py          (needs bitsandbytes)
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes
import torch
from bitsandbytes import functional
from safetensors.torch import save_file

TARGET = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "nf4_bitsandbytes.safetensors"


def main() -> None:
    torch.manual_seed(0)
    made = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        weight = (torch.randn(64, 80) * 0.02).to(dtype)
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        made |= {f"{name}.weight": weight, f"{name}.codes": codes.view(-1), f"{name}.absmax": state.absmax.float(),
                 f"{name}.back": functional.dequantize_4bit(codes, state)}  # fmt: skip
    save_file(made, TARGET, metadata={"bitsandbytes": bitsandbytes.__version__})


if __name__ == "__main__":
    main()
