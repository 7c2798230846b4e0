"""NF4: a frozen weight in 4.5 bits an element, as bitsandbytes lays it out (QLoRA, arXiv 2305.14314, section 3).

blob of n elements (n a multiple of 128): n / 2 bytes of codes, the first of a pair in the high half; then n / 64
float32 scales, the largest magnitude of each block. Blocks run through the flat weight, as bitsandbytes' do with
blocksize 64 and no double quantization.

On a CPU by our own kernels, because they are faster than bitsandbytes' and torchao's (scripts/bench_nf4.py);
elsewhere by torch's operators. The engine sees only `nbytes`, `encode` and `decode`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numba import njit

BLOCK = 64
PIECE_NUMEL = 1 << 20
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The quantiles of a normal distribution that the paper's appendix E lists."""
_TABLE = np.array(CODES, dtype=np.float32)
_MIDDLES = ((_TABLE[1:].astype(np.float64) + _TABLE[:-1]) / 2).astype(np.float32)


class Nf4:
    """Packs float weights of one flat buffer and gives them back."""

    name = "nf4"

    @staticmethod
    def nbytes(numel: int) -> int:
        """Bytes of the blob of `numel` elements, a multiple of 128."""
        assert numel % (2 * BLOCK) == 0, f"{numel} elements are no whole number of NF4 blocks"
        return numel // 2 + numel // BLOCK * 4

    def encode(self, values: torch.Tensor, blob: torch.Tensor) -> None:
        """Fill blob [nbytes] uint8 from values [numel], floats on the CPU."""
        codes, scales = _parts(blob, values.numel())

        def work(start: int) -> None:
            part = values[start : start + PIECE_NUMEL].float().numpy()
            blocks = slice(start // BLOCK, (start + part.size) // BLOCK)
            _encode(part, _MIDDLES, codes[start // 2 : (start + part.size) // 2].numpy(), scales[blocks].numpy())

        _each_piece(work, values.numel())

    def decode(self, blob: torch.Tensor, out: torch.Tensor) -> None:
        """Fill out [numel] of any float dtype from blob [nbytes] uint8, on one device."""
        codes, scales = _parts(blob, out.numel())
        if out.device.type != "cpu":
            _decode_by_torch(codes, scales, out)
            return

        def work(start: int) -> None:
            part = out[start : start + PIECE_NUMEL]
            wide = part if part.dtype == torch.float32 else torch.empty(part.numel())
            bytes_ = codes[start // 2 : (start + part.numel()) // 2]
            blocks = scales[start // BLOCK : (start + part.numel()) // BLOCK]
            _decode(bytes_.numpy(), blocks.numpy(), _TABLE, wide.numpy())
            if wide is not part:
                part.copy_(wide)

        _each_piece(work, out.numel())


NF4 = Nf4()


def _parts(blob: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [numel / 2], scales float32 [numel / 64]), views."""
    assert blob.numel() == Nf4.nbytes(numel), f"a blob of {blob.numel()} bytes is not of {numel} elements"
    return blob[: numel // 2], blob[numel // 2 :].view(torch.float32)


def _decode_by_torch(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    pairs = _pairs(out.device)
    step = 16 * PIECE_NUMEL  # bounds the float32 scratch
    for start in range(0, out.numel(), step):
        part = out[start : start + step]
        picked = pairs.index_select(0, codes[start // 2 : (start + part.numel()) // 2].int())
        picked = picked.view(-1, BLOCK).mul_(scales[start // BLOCK : (start + part.numel()) // BLOCK, None])
        part.view(-1, BLOCK).copy_(picked)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """[256, 2] float32: the two values of every byte."""
    byte, table = torch.arange(256), torch.tensor(CODES)
    return torch.stack([table[byte >> 4], table[byte & 15]], dim=1).to(device)


def _each_piece(work, numel: int) -> None:
    for done in _pool(torch.get_num_threads()).map(work, range(0, numel, PIECE_NUMEL)):
        assert done is None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="zft-nf4")


def _jit(function):
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # numba found no writable place for its cache
        return njit(nogil=True, error_model="numpy")(function)


@_jit
def _encode(values, middles, codes, scales):
    x, code = np.empty(64, np.float32), np.empty(64, np.int32)
    for block in range(scales.size):
        start, top = block * 64, np.float32(0.0)
        for i in range(64):
            top = max(top, abs(values[start + i]))
        scales[block] = top
        inverse = np.float32(1.0) / top if top > 0 else np.float32(0.0)
        for i in range(64):
            x[i] = values[start + i] * inverse
            code[i] = 0
        for m in range(15):
            middle = middles[m]
            for i in range(64):
                code[i] += np.int32(x[i] > middle)
        for pair in range(32):
            codes[block * 32 + pair] = np.uint8(code[2 * pair] << 4 | code[2 * pair + 1])


@_jit
def _decode(codes, scales, table, out):
    for block in range(scales.size):
        scale = scales[block]
        for pair in range(32):
            byte = codes[block * 32 + pair]
            out[block * 64 + 2 * pair] = table[byte >> 4] * scale
            out[block * 64 + 2 * pair + 1] = table[byte & 15] * scale
