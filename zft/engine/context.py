"""The torch context of one micro-batch. torch keeps it per thread, coroutines share a thread: so it is swapped by hand.

Grad mode, autocast, the stacks of function and dispatch modes and of saved-tensor hooks, and the random number stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch
from torch.utils._python_dispatch import _push_mode as _push_dispatch

AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass
class TorchContext:
    """A snapshot of this thread's torch state."""

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    cache: bool
    function_modes: list
    dispatch_modes: list
    saved_hooks: list
    rng_cpu: torch.Tensor
    rng_cuda: torch.Tensor | None

    @staticmethod
    def capture(device: torch.device) -> TorchContext:
        return TorchContext(
            torch.is_grad_enabled(),
            tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES),
            torch.is_autocast_cache_enabled(),
            list(_get_current_function_mode_stack()),
            list(_get_current_dispatch_mode_stack()),
            _saved_hooks(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore(self, device: torch.device) -> None:
        """Make this thread's state what it was when captured."""
        _restack(_get_current_function_mode_stack, _pop_mode, _push_mode, self.function_modes)
        _restack(_get_current_dispatch_mode_stack, _pop_dispatch, _push_dispatch, self.dispatch_modes)
        _restack(_saved_hooks, _pop_saved_tensors_default_hooks, _push_pair, self.saved_hooks)
        torch.set_grad_enabled(self.grad)
        for name, (enabled, dtype) in zip(AUTOCAST_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        torch.clear_autocast_cache()
        torch.set_rng_state(self.rng_cpu)
        if self.rng_cuda is not None:
            torch.cuda.set_rng_state(self.rng_cuda, device)

    def seeded(self, seed: int, step: int, micro_batch: int, device: torch.device) -> TorchContext:
        """This context with the random stream of one micro-batch, whatever the wave or rank it runs in."""
        generator = torch.Generator().manual_seed(stream_seed(seed, step, micro_batch))
        cuda = None
        if self.rng_cuda is not None:
            cuda = torch.Generator(device).manual_seed(stream_seed(seed, step, micro_batch)).get_state()
        return replace(self, rng_cpu=generator.get_state(), rng_cuda=cuda)


def stream_seed(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit seed from three numbers (the finaliser of SplitMix64, Steele et al. 2014, mixes each in)."""
    state = 0
    for value in (seed, step, micro_batch):
        state = (state + 0x9E3779B97F4A7C15 + value) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


def _saved_hooks() -> list[tuple]:
    """The (pack, unpack) pairs in force, outermost first."""
    pairs = []
    while (pair := _top_saved_tensors_default_hooks(False)) is not None:
        pairs.append(pair)
        _pop_saved_tensors_default_hooks()
    pairs.reverse()
    for pair in pairs:
        _push_saved_tensors_default_hooks(*pair)
    return pairs


def _push_pair(pair: tuple) -> None:
    _push_saved_tensors_default_hooks(*pair)


def _restack(current, pop, push, wanted: list) -> None:
    have = list(current())
    if have == wanted:
        return
    for _ in have:
        pop()
    for mode in wanted:
        push(mode)
