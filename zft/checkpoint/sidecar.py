"""The files of an export beside its weights: config, generation config, tokenizer, custom code.

What the base says is kept word for word and only what training changed is edited, so that every program that reads the
base reads the export: a config that went through transformers would lose old spellings (torch_dtype, rope_theta).
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

# keys that may differ between a config and its reloaded self without meaning anything
VOLATILE = {"_name_or_path", "name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
TOKENIZER_GLOBS = ("tokenizer*", "*.jinja", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt")
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def write_config(folder: Path, model: Any, base: Path | None, dtype: torch.dtype) -> None:
    """config.json with the true dtype, sub-configs too: the base's text edited or, if not equivalent, a new one."""
    name = str(dtype).removeprefix("torch.")
    config = copy.deepcopy(model.config)
    set_dtype(config, dtype)
    config.architectures = [type(model).__name__]
    target = folder / "config.json"
    if base is not None and (base / "config.json").is_file():
        raw = json.loads((base / "config.json").read_text(encoding="utf-8"))
        raw = _edited(raw, config, name)
        target.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if _equivalent(folder, config):
            return
        target.unlink()
    config.save_pretrained(folder)


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """The dtype of a config and of all its sub-configs."""
    config.dtype = dtype
    for key in getattr(config, "sub_configs", {}):
        if (sub := getattr(config, key, None)) is not None:
            set_dtype(sub, dtype)


def _edited(raw: dict[str, Any], config: Any, dtype: str) -> dict[str, Any]:
    _replace_dtype(raw, dtype)
    if not {"dtype", "torch_dtype"} & raw.keys():
        raw["dtype"] = dtype
    raw.pop("quantization_config", None)
    raw["architectures"] = config.architectures
    text = config.get_text_config()
    for holder in (raw, *(each for each in raw.values() if isinstance(each, dict))):
        if "vocab_size" in holder:
            holder["vocab_size"] = text.vocab_size
    if raw.get("tie_word_embeddings", config.tie_word_embeddings) != config.tie_word_embeddings or (
        "tie_word_embeddings" not in raw and type(config)().tie_word_embeddings != config.tie_word_embeddings
    ):
        raw["tie_word_embeddings"] = config.tie_word_embeddings
    if getattr(config, "auto_map", None):
        raw["auto_map"] = config.auto_map
    return raw


def _replace_dtype(raw: dict[str, Any], dtype: str) -> None:
    for key, value in raw.items():
        if key in ("dtype", "torch_dtype") and (value is None or isinstance(value, str)):
            raw[key] = dtype
        elif isinstance(value, dict):
            _replace_dtype(value, dtype)


def _equivalent(folder: Path, config: Any) -> bool:
    """Whether the config.json in `folder` means what `config` means."""
    try:
        loaded = type(config).from_pretrained(folder, local_files_only=True)
    except Exception:
        return False
    return _plain(loaded.to_dict()) == _plain(config.to_dict())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if key not in VOLATILE}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def write_generation_config(folder: Path, model: Any, base: Path | None, stop_ids: Sequence[int] = ()) -> list[str]:
    """generation_config.json: the base's own, repaired if transformers would refuse to save it, ending at stop_ids too.

    Returns warnings.
    """
    from transformers import GenerationConfig

    source = base / "generation_config.json" if base is not None else None
    if source is None or not source.is_file():
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            settings = model.generation_config.to_diff_dict()
            settings = {k: v for k, v in settings.items() if k != "transformers_version"}
            return _save_generation(folder, settings | _stops(settings, model, stop_ids))
        return []
    raw = source.read_text(encoding="utf-8")
    try:
        settings = json.loads(raw)
        GenerationConfig.from_dict(dict(settings)).validate(strict=True)
    except ValueError:
        settings = settings if isinstance(settings, dict) else {}
        return _save_generation(folder, settings | _stops(settings, model, stop_ids))
    if added := _stops(settings, model, stop_ids):
        raw = json.dumps(settings | added, indent=2, ensure_ascii=False) + "\n"
    (folder / source.name).write_text(raw, encoding="utf-8")
    return []


def _stops(settings: dict[str, Any], model: Any, stop_ids: Sequence[int]) -> dict[str, Any]:
    """{eos_token_id: the base's and `stop_ids`}; {} where the base's are enough."""
    present = settings.get("eos_token_id")
    known = model.config.get_text_config().eos_token_id if present is None else present
    known = list(known) if isinstance(known, list | tuple) else [] if known is None else [known]
    every = list(dict.fromkeys([*known, *stop_ids]))
    if not stop_ids or (present is not None and every == known):
        return {}
    return {"eos_token_id": every if len(every) > 1 else every[0]}


def _save_generation(folder: Path, settings: dict[str, Any]) -> list[str]:
    """Saves settings after dropping what makes them invalid, sampling settings under greedy decoding first."""
    from transformers import GenerationConfig

    warnings = []
    for drop in ((), SAMPLING, tuple(settings)):
        dropped = sorted(
            key for key in drop if key in settings and not (key.endswith("token_id") or key == "do_sample")
        )
        kept = {key: value for key, value in settings.items() if key not in dropped}
        try:
            config = GenerationConfig.from_dict(dict(kept))
            config.validate(strict=True)
            config.save_pretrained(folder)
        except ValueError:
            continue
        if dropped:
            what = ", ".join(f"{key}={settings[key]}" for key in dropped)
            sampling = f"do_sample={settings.get('do_sample', False)}"
            warnings.append(f"generation_config.json of the base is invalid ({sampling} with {what}): dropped {what}")
        return warnings
    return ["generation_config.json of the base is invalid and was left out"]


def write_tokenizer(folder: Path, tokenizer: Any, chat_template: str | None, base: Path | None) -> None:
    """Tokenizer files with the chat template trained with; without a tokenizer, the base's files as they are."""
    if tokenizer is None:
        for source in _tokenizer_sources(base):
            shutil.copyfile(source, folder / source.name)
        if chat_template is not None:
            _write_template(folder, chat_template)
        return
    tokenizer = copy.copy(tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    given = tokenizer.chat_template or ""
    templates = given.values() if isinstance(given, dict) else [given]
    tokenizer.save_pretrained(folder, save_jinja_files=_survives_a_file(*templates))
    # older readers (llama.cpp, sentencepiece) want files that tokenizer.json has replaced; stale once tokens are added
    for source in _tokenizer_sources(base):
        if source.name in SENTENCEPIECE and not (folder / source.name).exists() and not _has_grown(tokenizer, base):
            shutil.copyfile(source, folder / source.name)


def _survives_a_file(*templates: str) -> bool:
    """Whether templates come back from .jinja files as they are: transformers reads those with newlines translated."""
    return not any("\r" in template for template in templates)


def _write_template(folder: Path, template: str) -> None:
    """The chat template in place of the base's."""
    own = folder / "chat_template.jinja"
    if _survives_a_file(template):
        own.write_text(template, encoding="utf-8")
        return
    own.unlink(missing_ok=True)
    target = folder / "tokenizer_config.json"
    settings = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {}
    text = json.dumps({**settings, "chat_template": template}, indent=2, ensure_ascii=False)
    target.write_text(text + "\n", encoding="utf-8")


def _tokenizer_sources(base: Path | None) -> list[Path]:
    if base is None:
        return []
    found = {each for pattern in TOKENIZER_GLOBS for each in base.glob(pattern) if each.is_file()}
    found |= {base / name for name in SENTENCEPIECE if (base / name).is_file()}
    return sorted(found)


def _has_grown(tokenizer: Any, base: Path | None) -> bool:
    source = base / "tokenizer.json" if base is not None else None
    if source is None or not source.is_file():
        return True
    raw = json.loads(source.read_text(encoding="utf-8"))
    vocab = raw.get("model", {}).get("vocab", {})
    return len(tokenizer) > len({*vocab, *(each["content"] for each in raw.get("added_tokens", []))})


def write_code(folder: Path, model: nn.Module, base: Path | None) -> None:
    """Custom code that the model needs (`trust_remote_code`), image processors' settings, and the base's licence."""
    if base is not None:
        kept = [*base.glob("*.py"), *base.glob("LICENSE*"), *base.glob("NOTICE*"), *(base / name for name in PROCESSOR)]
        for source in kept:
            if source.is_file():
                shutil.copyfile(source, folder / source.name)
    if type(model).__module__.startswith("transformers_modules"):
        _localise_code(folder, model)


def _localise_code(folder: Path, model: Any) -> None:
    """Code that was loaded from another repository (`repo--module.Class`) is copied: the folder must stand alone."""
    from transformers.dynamic_module_utils import custom_object_save

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    auto_map = config.get("auto_map", {})
    for thing in (model, model.config):
        if type(thing).__module__.startswith("transformers_modules"):
            custom_object_save(thing, folder)
    config["auto_map"] = {key: _local(value) for key, value in auto_map.items()}
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _local(reference: Any) -> Any:
    if isinstance(reference, (list, tuple)):
        return [_local(each) for each in reference]
    return reference.split("--")[-1] if isinstance(reference, str) else reference
