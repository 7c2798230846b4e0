"""Whether a model keeps packed documents apart, by what it hands to the function that makes its attention mask.

transformers finds packed documents in `position_ids`, but only where the model's forward passes them on: GPT-OSS and
OPT, among others, do not in 5.24, and packed documents then see each other. A layer with a recurrent state carries it
from one document into the next whatever the mask.
"""

from __future__ import annotations

import inspect
import sys

import torch

_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


class _MaskCalled(Exception):
    """Stops a probing forward where it makes its mask."""


def packing_problem(model) -> str | None:
    """Why packed documents would see each other in this transformers model; None when they don't.

    Runs the model up to its mask, which is before its first layer; parameters may be on meta.
    """
    config = model.config.get_text_config()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no position_ids"
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    if recurrent or any(getattr(type(module), "_is_stateful", False) for module in model.modules()):
        return " ".join(["its layers keep a state along the sequence", *recurrent])
    passed = _passed_to_mask(model)
    if passed is None:
        return "its code makes no mask that knows documents"
    return None if passed else "its code makes the attention mask without position_ids"


def _passed_to_mask(model) -> bool | None:
    """Whether position_ids reach a mask function; None when none is called."""
    seen: list[bool] = []

    def record(*_, position_ids=None, **__):
        seen.append(position_ids is not None)
        raise _MaskCalled

    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    replaced = [(m, name, getattr(m, name)) for m in modules for name in _MAKERS if hasattr(m, name)]
    table = model.get_input_embeddings().weight
    ids = torch.zeros(1, 2, dtype=torch.int64, device=table.device)
    # the names are the modules' own, imported from masking_utils, and are put back at once
    for module, name, _ in replaced:
        setattr(module, name, record)
    try:
        # some models read the values of input_ids, which meta tensors don't have; others need them
        for inputs in ({"input_ids": ids}, {"inputs_embeds": table.new_zeros(1, 2, table.shape[1])}):
            try:
                with torch.no_grad():
                    model(**inputs, position_ids=ids, use_cache=False)
            except _MaskCalled:
                break
            except (RuntimeError, NotImplementedError):
                continue
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)
    return seen[0] if seen else None
