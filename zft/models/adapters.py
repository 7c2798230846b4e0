"""Adapters on a model that lies on meta: PEFT's own layers, their first values, the base's weights under PEFT's names.

model = build_model(folder); source = HubWeights(folder, model)
model, source = attach_adapter(model, source, MethodConfig(name="lora"))      # a PeftModel, and what the engine reads
engine = Engine(model, config, source)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from zft.config import Method, MethodConfig, ZftError
from zft.models.adapter_weights import ADAPTER, AdapterFile, AdapterWeights
from zft.models.targets import (
    ALL_LINEAR,
    adaptable_modules,
    endings,
    find_targets,
    linear_layers,
    linear_types,
    matches,
)

INITS = {"default": True, "gaussian": "gaussian"}
"""First values of A and B, by their name in `method.init`; none of them looks at the base's weights."""
_VARIANTS = ("DoraLinearVariant", "DoraEmbeddingVariant")


def attach_adapter(
    model: nn.Module, base: Any, method: MethodConfig, seed: int = 0, new_tokens: Sequence[int] = ()
) -> tuple[Any, AdapterWeights]:
    """Put the adapter that `method` describes on a model on meta; everything else is frozen.

    base: the model's own weight source (HubWeights), made before. new_tokens: ids whose rows are trained beside the
    adapter. seed: of A; the values depend on it and on the layer's name alone. Returns the PeftModel and the source of
    all its weights. Raises ZftError for targets that match nothing, a tied head, an adapter that doesn't fit.
    """
    from peft import get_peft_model

    saved = AdapterFile(method.adapter) if method.adapter else None
    config = saved_config(saved.folder, method) if saved else lora_config(model, method, new_tokens)
    check_tied(model, config)
    check_rows(model, config, method)
    names, linear = AdapterWeights.base_names(model), endings(n for n in linear_layers(model) if "expert" not in n)
    model.requires_grad_(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what was looked at here already: Conv1D, tied weights
            wrapped = get_peft_model(model, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)
    except (ValueError, KeyError, NotImplementedError) as error:
        reason = f"this adapter can't be put on {type(model).__name__}: {' '.join(str(error).split())[:240]}"
        if "ParamWrapper" in reason:  # PEFT knows LoRA on fused experts, but neither DoRA nor dropout
            reason += f"; its experts are fused parameters: leave them out with method.targets=[{','.join(linear)}]"
        raise ZftError(reason) from error
    _check_variants(wrapped)
    if method.name is Method.qlora:
        wrapped._quantized_names = quantizable(wrapped)  # read by the engine's façade
    return wrapped.train(), AdapterWeights(wrapped, base, names, seed, saved)


def lora_config(model: nn.Module, method: MethodConfig, new_tokens: Sequence[int] = ()) -> Any:
    """PEFT's LoraConfig for `method.*`. Raises ZftError."""
    from peft import LoraConfig

    if method.init not in INITS:
        raise ZftError(
            f"method.init is one of {', '.join(INITS)}, got {method.init!r}; initialisations that change the base's "
            "weights (pissa, olora, corda, loftq, lora_ga, ...) or need a pass over data (eva) are not supported"
        )
    targets = find_targets(model, method.targets)
    modules = adaptable_modules(model)
    names = [name for name, _ in model.named_modules() if name]
    for entry in method.modules_to_save:
        if not matches(entry, names):
            could = dict.fromkeys(name.rpartition(".")[2] for name in names if not name[-1].isdigit())
            raise ZftError(
                f"method.modules_to_save names {entry!r}, which no module is called; it could be {', '.join(could)}"
            )
    conv = any(type(modules[name]) is linear_types()[1] for t in targets.modules for name in matches(t, modules))
    plain = method.targets == (ALL_LINEAR,)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=method.r,
        lora_alpha=int(method.alpha) if float(method.alpha).is_integer() else method.alpha,
        lora_dropout=method.dropout,
        target_modules=ALL_LINEAR if plain and linear_layers(model) else targets.modules or None,
        target_parameters=targets.parameters or None,
        modules_to_save=list(method.modules_to_save) or None,
        use_dora=method.name is Method.dora,
        use_rslora=method.name is Method.rslora,
        init_lora_weights=INITS[method.init],
        fan_in_fan_out=conv,
        trainable_token_indices=_token_indices(model, new_tokens),
    )


def saved_config(folder: Path, method: MethodConfig) -> Any:
    """The configuration of an adapter to go on from; its rank, scale and targets hold. Raises ZftError."""
    from peft import LoraConfig, PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ZftError(f"method.adapter={folder} has no usable adapter_config.json ({str(error)[:120]})") from error
    if not isinstance(config, LoraConfig):
        raise ZftError(f"method.adapter={folder} is a {config.peft_type} adapter; zft goes on with LoRA, rsLoRA, DoRA")
    init = config.init_lora_weights
    if not isinstance(init, bool) and init not in INITS.values():
        raise ZftError(
            f"method.adapter={folder} was initialised with {init}, which changes the base's weights; convert it first"
        )
    if config.bias != "none":
        raise ZftError(f"method.adapter={folder} trains biases (bias={config.bias!r}); only bias='none' is supported")
    kind = Method.dora if config.use_dora else Method.rslora if config.use_rslora else Method.lora
    if kind is not method.name and not (method.name is Method.qlora and kind is not Method.dora):
        raise ZftError(f"method.adapter={folder} is a {kind} adapter, but method={method.name}; set method={kind}")
    config.inference_mode = False
    config.init_lora_weights = True
    return config


def check_tied(model: nn.Module, config: Any) -> None:
    """Raises ZftError for an adapter on an embedding whose weight is the head's too: merged or reloaded, one of the two
    would silently change with the other (peft issues 2018, 2972)."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or head.weight is not embedding.weight:
        return
    ends = {name: m for name, m in model.named_modules() if m is embedding or m is head}
    listed = {"method.targets": config.target_modules, "method.modules_to_save": config.modules_to_save}
    for key, entries in listed.items():
        entries = [entries] if isinstance(entries, str) else entries or ()
        for entry in entries:
            hit = [] if entry == ALL_LINEAR else matches(entry, ends)
            if hit:
                raise ZftError(
                    f"{key} includes {hit[0]}, but {' and '.join(ends)} share one weight (tie_word_embeddings); "
                    "leave it out, or untie the model first"
                )


def check_rows(model: nn.Module, config: Any, method: MethodConfig) -> None:
    """Raises ZftError for an adapter that was trained with more tokens than the model has rows for."""
    indices = config.trainable_token_indices or {}
    last = max(
        (row for rows in (indices.values() if isinstance(indices, dict) else [indices]) for row in rows), default=-1
    )
    rows = model.get_input_embeddings().weight.shape[0]
    if last >= rows:
        raise ZftError(
            f"method.adapter={method.adapter} trained row {last} of the embedding, but the model has {rows} rows; "
            "grow the model to the tokenizer that was saved with the adapter first (zft.models.load.grow)"
        )


def quantizable(wrapped: Any) -> frozenset[str]:
    """Names of the frozen weights that QLoRA quantizes: of linear layers and stacks of experts, not the head's."""
    ends = [end for end in (wrapped.get_input_embeddings(), wrapped.get_output_embeddings()) if end is not None]
    kept = {id(p) for end in ends for p in end.parameters()}
    linear = {id(m.weight) for m in wrapped.modules() if isinstance(m, linear_types())}
    return frozenset(
        name for name, p in wrapped.named_parameters()
        if not p.requires_grad and id(p) not in kept and (id(p) in linear or p.dim() == 3)
    )  # fmt: skip


def _token_indices(model: nn.Module, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """Rows to train, by module; a tied head follows its embedding by itself."""
    if not ids:
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    return {name: list(ids) for name, module in model.named_modules() if any(module is end for end in ends)}


def _check_variants(wrapped: Any) -> None:
    for name, module in wrapped.named_modules():
        for variant in getattr(module, "lora_variant", {}).values():
            if type(variant).__name__ not in _VARIANTS:
                raise ZftError(
                    f"{name} would be a {type(variant).__name__}, which zft doesn't support; use LoRA or DoRA"
                )
