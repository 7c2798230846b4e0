"""Sums of squares for the global norm: float64, over fixed blocks, in a fixed order. Non-finite values show in them."""

from __future__ import annotations

import torch

NORM_BLOCK = 65536
"""Elements summed into one float64."""


def sumsq_blocks(grad: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """grad [n] bfloat16 or float32 -> float64 [ceil(n / NORM_BLOCK)], a sum of squares per block, on grad's device.

    Pass chunks that start at multiples of NORM_BLOCK, then the blocks do not depend on the chunks. Add them with
    math.fsum, which is exact and so independent of the order.
    """
    blocks = -(-grad.numel() // NORM_BLOCK)
    if out is None:
        out = torch.empty(blocks, dtype=torch.float64, device=grad.device)
    fits = out.shape == (blocks,) and out.dtype == torch.float64
    assert fits, f"out is float64 [{blocks}], got {out.dtype} {list(out.shape)}"
    if grad.is_cuda:
        padded = torch.nn.functional.pad(grad, (0, -grad.numel() % NORM_BLOCK)).view(blocks, NORM_BLOCK)
        out.copy_(torch.linalg.vector_norm(padded, dim=1, dtype=torch.float64).square_())
        return out
    from zft.optim import kernels  # numba takes a while to import

    if grad.dtype == torch.bfloat16:
        kernels.sumsq(grad.view(torch.uint16).numpy(), None, grad.numel(), NORM_BLOCK, out.numpy())
    else:
        kernels.sumsq(None, grad.to(torch.float32).numpy(), grad.numel(), NORM_BLOCK, out.numpy())
    return out
