"""The command line's key=value arguments: which keys exist, and names on disk, which are taken literally."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from zft.config import ZftError
from zft.schema import ENGINE_ALIASES, GROUPS, Key, keys

FOREIGN = {
    "learning_rate": "train.lr",
    "max_learning_rate": "train.lr",
    "max_length": "train.seq_len",
    "max_seq_length": "train.seq_len",
    "max_seq_len": "train.seq_len",
    "sequence_len": "train.seq_len",
    "cutoff_len": "train.seq_len",
    "block_size": "train.seq_len",
    "context_length": "train.seq_len",
    "output_dir": "out",
    "output": "out",
    "save_dir": "out",
    "out_dir": "out",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.micro_batch_size",
    "micro_batch": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "grad_accum": "train.grad_accum_steps",
    "accumulate_grad_batches": "train.grad_accum_steps",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "num_warmup_steps": "train.warmup_steps",
    "warmup": "train.warmup_steps",
    "gradient_clipping": "train.max_grad_norm",
    "clip_grad_norm": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "save_steps": "train.save_every",
    "save_interval": "train.save_every",
    "save_total_limit": "train.keep",
    "eval_steps": "train.eval_every",
    "eval_interval": "train.eval_every",
    "random_seed": "train.seed",
    "model_name_or_path": "model",
    "model_name": "model",
    "model_path": "model",
    "model_id": "model",
    "base_model": "model",
    "pretrained_model_name_or_path": "model",
    "dataset": "data",
    "datasets": "data",
    "dataset_name": "data",
    "data_path": "data",
    "train_file": "data",
    "eval_dataset": "eval_data",
    "val_data": "eval_data",
    "validation_file": "eval_data",
    "packing": "data_options.pack",
    "sample_packing": "data_options.pack",
    "template": "data_options.chat_template",
    "lora_r": "method.r",
    "lora_rank": "method.r",
    "rank": "method.r",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "lora_target": "method.targets",
    "lora_target_modules": "method.targets",
    "target_modules": "method.targets",
    "finetuning_type": "method",
    "peft": "method",
    "optim": "optimizer",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "zero_stage": "engine.stage",
    "offload_optimizer": "engine.state_tier",
    "offload_param": "engine.param_tier",
    "nvme_path": "engine.nvme_dir",
    "deepspeed": "engine",
    "fsdp": "engine",
    "dtype": "precision",
    "torch_dtype": "precision",
    "mixed_precision": "precision",
    "bf16": "precision",
    "fp16": "precision",
    "gradient_checkpointing": "activation",
    "activation_checkpointing": "activation",
    "torch_compile": "compile",
    "report_to": "track",
    "num_processes": "nproc",
    "nproc_per_node": "nproc",
    "num_gpus": "nproc",
    "overwrite_output_dir": "overwrite",
}
"""What other tools call a key, by its last part."""

_DATA_FILES = {".jsonl", ".json", ".csv", ".parquet", ".txt", ".gguf", ".gz", ".zst", ".safetensors", ".yaml"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Override:
    """One key=value argument. `key` is a full name of `zft.schema.keys` or a group."""

    key: str
    text: str


def parse(args: list[str], options: dict[str, list[str]]) -> tuple[list[Override], list[str]]:
    """Arguments to overrides, and one line for each argument that is none. `options`: the choices of each group."""
    found, problems = [], []
    for arg in args:
        key, equals, text = arg.partition("=")
        if not equals or not key:
            problems.append(f"expected key=value, got {arg!r}")
            continue
        key = ENGINE_ALIASES.get(key, key)
        if key in GROUPS and text not in options[key]:
            problems.append(f"{key} has no option {text!r}; choose {', '.join(options[key])}")
        elif key in GROUPS or key in keys():
            found.append(Override(key, text))
        elif key.startswith("data_options.columns."):
            found.append(Override("data_options.columns", f"{{{key.removeprefix('data_options.columns.')}: {text}}}"))
        else:
            problems.append(f"unknown key {key!r} in {arg!r}: {suggest(key)}")
    return found, problems


def suggest(key: str) -> str:
    """The sentence that helps someone who wrote the unknown `key`."""
    name = key.lstrip("+~").replace("-", "_").lower()
    if name in keys() or name in GROUPS:
        return f"write {name}=VALUE"
    leaf = name.rpartition(".")[2]
    if leaf in FOREIGN:
        return f"zft calls it {FOREIGN[leaf]}"
    full = [known for known in keys() if known.rpartition(".")[2] == leaf]
    if leaf in GROUPS or full:
        return f"its full name is {' or '.join(full or [leaf])}"
    names = [*keys(), *GROUPS]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    leaves = {known.rpartition(".")[2]: known for known in keys()}
    pool = {**FOREIGN, **leaves, **{group: group for group in GROUPS}}
    close = close or [pool[match] for match in difflib.get_close_matches(leaf, pool, n=1, cutoff=0.6)]
    return f"did you mean {close[0]}?" if close else "`zft run sft --help` lists the keys"


def literal(key: Key, text: str, cwd: Path) -> object:
    """The value of a key whose text is taken literally: names on disk, resolved against `cwd`, and free strings."""
    if key.name in ("data", "eval_data"):
        return sources(text, key.name, cwd)
    if text == "null" and (key.is_optional or key.default == ()):
        return None
    if not text:
        raise ZftError(f"{key.name} is empty; give it a value")
    if key.name == "model":
        return name_on_disk(text, "model", cwd)
    if key.name == "data_options.chat_template" and text == "chatml":
        return text
    if not key.is_path:
        return text
    path = _local(text, cwd)
    if key.name in ("data_options.chat_template", "method.adapter") and not path.exists():
        raise ZftError(f"{key.name}: no such file or folder, got {text!r}; give a path that exists")
    return str(path)


def name_on_disk(text: str, key: str, cwd: Path) -> str:
    """A local path made absolute, or a Hub id as it stands. Raises ZftError where it can be neither."""
    path = _local(text, cwd)
    if path.exists():
        return str(path)
    if _HUB_ID.fullmatch(text) and Path(text).suffix.lower() not in _DATA_FILES:
        return text
    raise ZftError(f"{key}: no such file or folder, got {text!r}; give a path that exists or a Hub id such as org/name")


def _local(text: str, cwd: Path) -> Path:
    path = Path(os.path.abspath(cwd / text))
    return path if path.exists() or not text.startswith("~") else Path(text).expanduser()


def sources(text: str, key: str, cwd: Path) -> list[dict]:
    """`a.jsonl`, `[a.jsonl,b.jsonl]` or `[{path: a.jsonl, weight: 0.5}, …]` to a list of {path, weight}."""
    if text in ("", "null", "[]"):
        raise ZftError(f"{key} is empty; give it a file, a folder or a Hub id")
    if not (text.startswith("[") and text.endswith("]")) or _local(text, cwd).exists():
        return [{"path": name_on_disk(text, key, cwd), "weight": None}]
    return [_source(item, key, cwd) for item in _split(text[1:-1])]


def _source(item: str, key: str, cwd: Path) -> dict:
    fields = {"path": item, "weight": "null"}
    if item.startswith("{") and item.endswith("}"):
        fields = {"weight": "null"}
        for part in _split(item[1:-1]):
            name, colon, value = part.partition(":")
            if not colon or name.strip() not in ("path", "weight"):
                raise ZftError(f"{key}: expected {{path: FILE, weight: NUMBER}}, got {item!r}")
            fields[name.strip()] = value.strip()
    try:
        weight = None if fields["weight"] == "null" else float(fields["weight"])
    except ValueError:
        weight = -1.0
    if "path" not in fields or not (weight is None or 0 < weight < float("inf")):
        raise ZftError(f"{key}: expected {{path: FILE, weight: NUMBER > 0}}, got {item!r}")
    return {"path": name_on_disk(_unquote(fields["path"]), key, cwd), "weight": weight}


def _split(text: str) -> list[str]:
    """Split at commas outside quotes and braces."""
    parts, depth, quote, start = [], 0, "", 0
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and not text[start:place].strip("{ ").removeprefix("path:").strip():
            quote = char
        elif char in "{}":
            depth += 1 if char == "{" else -1
        elif char == "," and depth <= 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
