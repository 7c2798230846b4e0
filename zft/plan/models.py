"""The structure of a model by its config alone: a folder with a config.json, a Hub id, or a name of models.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import nn

from zft.config import Method, RunConfig, ZftError
from zft.dist import World
from zft.models.adapters import attach_adapter
from zft.models.load import load_config
from zft.plan.shapes import ModelShape, shape_of
from zft.precision import resolve_precision


@cache
def known_models() -> dict[str, dict]:
    """Hub id -> {alias, numel, config}."""
    return yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))


def hub_id(name: str) -> str:
    """The Hub id of an alias of models.yaml; any other name as it is."""
    return next((key for key, row in known_models().items() if row["alias"] == name), name)


def config_of(model: str, trust_remote_code: bool = False) -> Any:
    """The transformers config of a folder, a .gguf file, or a Hub id (known here, or its config.json alone is fetched).

    Raises ZftError.
    """
    from transformers import AutoConfig

    if model in known_models() and not Path(model).exists():
        row = dict(known_models()[model]["config"])
        config = AutoConfig.for_model(row.pop("model_type"), **row)
        config.name_or_path = model
        return config
    path = Path(model).expanduser()
    if path.is_dir():
        return load_config(path, trust_remote_code)
    if path.is_file():
        from zft.models.hub import resolve_model

        return load_config(resolve_model(model), trust_remote_code)
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:
        names = ", ".join(row["alias"] for row in known_models().values())
        raise ZftError(
            f"model={model} is neither a folder here, nor can its config.json be had from the Hub "
            f"({' '.join(str(error).split())[:120]}); known without a network: {names}"
        ) from error


def structure(run: RunConfig, world: World) -> nn.Module:
    """The model that a run would train, without weights: on meta, tied as its config says, with its adapter."""
    from transformers import AutoModelForCausalLM, initialization

    config = config_of(run.model, run.trust_remote_code)
    dtype = resolve_precision(run.engine, world.device).hi_dtype
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # zft dequantizes while it loads
    try:
        with torch.device("meta"), initialization.no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=run.trust_remote_code)
    except Exception as error:
        raise ZftError(f"model={run.model} can't be built: {' '.join(str(error).split())[:200]}") from error
    model.tie_weights()
    if run.method.name is not Method.full:
        model, _ = attach_adapter(model, SimpleNamespace(folder=None), run.method)
    return model


def shape_for(run: RunConfig, world: World) -> ModelShape:
    """The shape of what a run would train."""
    return shape_of(structure(run, world), run.engine, world)
