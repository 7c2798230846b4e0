"""A model as the engine takes it: no wrapper around it, no key-value cache while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zft.config import ZftError


def check_unwrapped(model: nn.Module) -> None:
    """Raises ZftError for a model inside another's wrapper, whose prefix would get into the names of all weights."""
    inner = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    for name, _ in model.named_parameters():
        if parallel or inner & set(name.split(".")):
            raise ZftError(
                f"the model is wrapped: it has a parameter {name}; pass the model itself (engine.compile=true compiles, "
                "engine.activation recomputes, and the engine shards by itself)"
            )


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """No key-value cache by default: a loss_fn that doesn't say use_cache=False would get one from the model's config."""
    found = {
        id(config): config for m in model.modules() if getattr(config := getattr(m, "config", None), "use_cache", False)
    }
    for config in found.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in found.values():
            config.use_cache = True
