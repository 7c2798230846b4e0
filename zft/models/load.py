"""A causal LM on the meta device, ready for weights to be streamed in, and its tokenizer.

build_model(folder)  -> structure without weights; rotary tables and the like are real, as from_pretrained makes them
grow(model, rows)    -> room for tokens that the tokenizer has and the model lacks
HubWeights(folder, model).read(names)  -> the weights, one unit at a time (zft/models/weights.py)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zft.config import ZftError
from zft.models.quantized import check_quantization, take_dequantizer
from zft.models.source import open_folder
from zft.models.weights import HubWeights, stored_name

__all__ = [
    "HubWeights", "build_model", "check_tokens", "embedding_rows", "grow", "load_config", "load_tokenizer", "tokenizer_rows",
]  # fmt: skip

log = logging.getLogger(__name__)


def load_config(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """The transformers config of a local folder. Raises ZftError in one line for anything that is wrong with it."""
    from transformers import AutoConfig

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ZftError(f"{folder} has no config.json; give a folder that from_pretrained can load, a .gguf or a Hub id")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise ZftError(_reason(folder, error)) from error
    check_quantization(folder, config)
    return config


def _reason(folder: Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text or "custom code" in text:
        return f"{folder} needs code that comes with the model; read it, then set trust_remote_code=true"
    return f"{folder} cannot be loaded: {text[:200] or type(error).__name__}"


def build_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model of a folder with all parameters and persistent buffers on meta, in train mode, tied where it is tied.

    dtype: of the parameters; None: what config.json says, else that of the first weight (from_pretrained's "auto").
    `_keep_in_fp32_modules` stay float32 as in from_pretrained. Non-persistent buffers are real CPU tensors with exactly
    the values that from_pretrained gives. Raises ZftError.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    config = load_config(folder, trust_remote_code)
    dtype = dtype or stored_dtype(folder, config)
    dequantizer = take_dequantizer(config)
    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        with torch.device("meta"), _no_init():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code, **options
            )
    except Exception as error:
        raise ZftError(_reason(folder, error)) from error
    config.name_or_path = model.config.name_or_path = model.name_or_path = str(folder)
    model._dequantizer = dequantizer  # read by HubWeights
    _tie(model, folder)
    _keep_in_fp32(model, dtype)
    _real_buffers(model)
    _generation_config(model, folder)
    return model.train()


def stored_dtype(folder: str | Path, config: Any) -> torch.dtype:
    """The dtype of a folder's weights: what config.json says, else that of the first float tensor ("auto")."""
    stored = config.dtype if getattr(config, "dtype", None) is not None else config.get_text_config().dtype
    if isinstance(stored, str):
        stored = getattr(torch, stored)
    tensors = open_folder(Path(folder))
    try:
        found = (d for key in tensors.names() if (d := tensors.dtype(key)).is_floating_point and d.itemsize > 1)
        return stored or next(found, torch.float32)
    finally:
        tensors.close()


def _no_init() -> Any:
    from transformers import initialization

    return initialization.no_init_weights()


def dtype_plan(model: nn.Module, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """name -> the dtype that transformers insists on when loading in `dtype` (_keep_in_fp32_modules), or None."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return lambda name: None
    from transformers.core_model_loading import build_glob_alternation

    pattern, group_to_glob, _ = build_glob_alternation(list(plan))

    def planned(name: str) -> torch.dtype | None:
        found = pattern.search(name)
        return plan[group_to_glob[found.lastgroup]] if found is not None else None

    return planned


def _keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    planned = dtype_plan(model, dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        wanted = planned(name)
        if wanted is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(wanted)


@torch.no_grad()
def _real_buffers(model: nn.Module) -> None:
    """Non-persistent buffers by transformers' own initialisation, which skips all that is marked as initialised."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)


def _tie(model: nn.Module, folder: Path) -> None:
    """Ties as the config says, unless the folder stores different values: that config is wrong (as from_pretrained)."""
    tied = dict(model.all_tied_weights_keys)
    if tied:
        tensors, names = open_folder(folder), model.state_dict()
        stored = {stored_name(key, model, names): key for key in tensors.names()}
        for target, source in tied.items():
            if target in stored and source in stored and not tensors.same(stored[target], stored[source]):
                log.warning("%s ties %s to %s but stores different values: left untied", folder, target, source)
                model.all_tied_weights_keys.pop(target)
                model.config.tie_word_embeddings = False
        tensors.close()
    model.tie_weights(recompute_mapping=False)


def _generation_config(model: nn.Module, folder: Path) -> None:
    from transformers import GenerationConfig

    if model.can_generate() and (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            log.warning("%s: generation_config.json is not usable (%s)", folder, " ".join(str(error).split()))


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder. Raises ZftError if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ZftError(
            f"{folder} has no usable tokenizer ({text[:160]}); save one with save_pretrained there"
        ) from error


def tokenizer_rows(tokenizer: Any) -> int:
    """Rows that an embedding needs for this tokenizer: its highest id + 1 (gaps count, `len` would not)."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def embedding_rows(config: Any, tokenizer: Any) -> int | None:
    """Rows that the embedding of a model of this config has once it is grown for the tokenizer; None: unknown."""
    known = getattr(config.get_text_config(), "vocab_size", None)
    return None if known is None else max(known, tokenizer_rows(tokenizer))


def grow(model: nn.Module, rows: int) -> bool:
    """Makes room for `rows` tokens in the input embedding and the head of a model on meta; never shrinks.

    Sets config.vocab_size; True if anything changed. The values come from HubWeights: old rows bit for bit, new rows
    their float32 mean, the same on every rank. Call before HubWeights is made.
    """
    embedding = model.get_input_embeddings()
    if rows <= embedding.weight.shape[0]:
        return False
    if embedding.weight.device.type != "meta":
        raise AssertionError("grow expects a model on meta")
    before = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    with _no_init(), torch.device("meta"):
        model.resize_token_embeddings(rows, mean_resizing=False)
    after = dict(model.named_parameters(remove_duplicate=False))
    model._grown_names = {name for name, parameter in after.items() if parameter.shape != before[name]}
    if model.get_input_embeddings().weight.shape[0] != rows:
        raise ZftError(f"the embedding of {type(model).__name__} cannot be resized to {rows} tokens")
    return True


def check_tokens(model: nn.Module, tokenizer: Any) -> None:
    """Raises ZftError if the tokenizer can produce an id that the embedding has no row for."""
    rows = model.get_input_embeddings().weight.shape[0]
    need = tokenizer_rows(tokenizer)
    if need > rows:
        name = tokenizer.convert_ids_to_tokens(need - 1)
        raise ZftError(
            f"token {name!r} has id {need - 1} but the model has {rows} rows; use this model's own tokenizer"
        )
