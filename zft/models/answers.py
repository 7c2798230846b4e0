"""Answers of a model folder by plain transformers and PEFT: what anyone gets who loads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zft.config import ZftError
from zft.models.load import load_config


def load_plain(name: str | Path, trust_remote_code: bool = False) -> Any:
    """The model of a folder, or the base that an adapter names with the adapter on it, on the GPU if there is one.

    On a CPU in float32: bfloat16 products are slow on many. Raises ZftError.
    """
    on_gpu = torch.cuda.is_available()
    options = {"dtype": "auto" if on_gpu else torch.float32, "trust_remote_code": trust_remote_code}
    return _load(name, options).to("cuda" if on_gpu else "cpu").eval()


def _load(name: str | Path, options: dict[str, Any]) -> Any:
    if not (Path(name) / "adapter_config.json").is_file():
        from transformers import AutoModelForCausalLM

        load_config(name, options["trust_remote_code"])
        return AutoModelForCausalLM.from_pretrained(name, **options)
    from peft import AutoPeftModelForCausalLM  # it also makes room for new tokens

    try:
        return AutoPeftModelForCausalLM.from_pretrained(name, **options)
    except OSError as error:
        why = str(error).splitlines()[0]
        raise ZftError(f"{name} is an adapter and its base model can't be loaded: {why}") from error


def answer_ids(
    model: Any, prompt: torch.Tensor, max_new_tokens: int, stop_ids: Sequence[int] = (), streamer: Any = None
) -> list[int]:
    """The tokens that follow prompt [1, T], greedily, up to the model's own end tokens or one of stop_ids."""
    own = model.generation_config.eos_token_id
    ends = [*(own if isinstance(own, list) else [] if own is None else [own]), *stop_ids]
    prompt = prompt.to(model.device)
    made = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False,
        streamer=streamer, eos_token_id=list(dict.fromkeys(ends)) or None,
    )  # fmt: skip
    return made[0, prompt.shape[1] :].tolist()
