"""The stand-in for a weight that is not in memory: its shape and dtype are true, and computing with its values raises.

A plain meta tensor is not enough: torch's matrix products and in-place additions on the CPU take one and return
whatever lies in memory (torch 2.13), so that a weight used outside of its module would give finite, wrong numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map


class Absent(torch.Tensor):
    """On meta, and so is what is made of it alone. Together with a tensor that has values it raises RuntimeError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(not tensor.is_meta for tensor in tensors):
                shape = next(tuple(tensor.shape) for tensor in tensors if isinstance(tensor, Absent))
                raise RuntimeError(
                    f"a weight {list(shape)} was used outside of the module that owns it, where it is on meta: its "
                    "values are not in memory. Use it inside of its module, or read engine.named_parameters()"
                )
            return tree_map(_marked, func(*args, **kwargs))

    def __deepcopy__(self, memo: dict) -> Absent:
        return memo.setdefault(id(self), absent_parameter(self.shape, self.dtype, self.requires_grad))


def absent_parameter(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    """A parameter without values."""
    empty = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Absent)
    return nn.Parameter(empty, requires_grad=requires_grad)


def _marked(value: Any) -> Any:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, Absent)
    return value.as_subclass(Absent) if is_plain and value.is_meta else value
