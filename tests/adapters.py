"""Adapters for tests: an engine that trains one, and PEFT itself in a plain loop as the reference."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tests.tiny import tiny_folder
from zft.api import Engine
from zft.config import AdamW, EngineConfig, Method, MethodConfig
from zft.engine.fill import get_field

OPTIM = AdamW(lr=1e-2, eps=1e-3)
PLAIN_GPT2 = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def base_folder(arch: str, path: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A tiny base model without dropout."""
    return tiny_folder(arch, path, dtype=dtype, **({**PLAIN_GPT2, **overrides} if arch == "gpt2" else overrides))


def method(name: str = "lora", **options: Any) -> MethodConfig:
    return MethodConfig(name=Method(name), r=4, alpha=8.0, **options)


def engine_config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"precision": "fp32", "compute_device": "cpu", "optim": OPTIM, **options})


def random_adapter(base: Path, folder: Path, options: MethodConfig) -> Path:
    """An adapter as PEFT saves it, whose A, B and magnitudes are all far from their first values."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from zft.models.adapters import lora_config

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, lora_config(model, options))
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    return folder


def peft_model(base: Path, folder: Path, trainable: bool = False) -> Any:
    """The base with an adapter, by PEFT alone, float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(model, folder, is_trainable=trainable)


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """{name: float32 gradient of the last step}, whole on every rank; before the update is drained."""
    found = {}
    for group, record in engine.parts.records.items():
        if not group.trainable:
            continue
        own = get_field(record, "grad", 0, record.ranges.grad_numel).float()
        flat = own
        if own.numel() != group.layout.padded_numel:
            flat = torch.empty(group.layout.padded_numel)
            engine.world.gather_shards(flat, own)
        found |= {s.name: flat[s.offset : s.end].view(s.shape).clone() for s in group.layout.spans}
    return found


def batches(count: int, vocab: int = 64, seed: int = 5) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of different lengths with unsupervised heads."""
    generator, made = torch.Generator().manual_seed(seed), []
    for index in range(count):
        ids = torch.randint(5, vocab, (2, 7 + index), generator=generator)
        labels = ids.clone()
        labels[:, : 2 + index % 3] = -100
        made.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return made


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference; a tensor that only one side has counts against zero."""
    zero = torch.zeros(())
    names = ours.keys() | theirs.keys()
    return max((ours.get(name, zero) - theirs.get(name, zero)).abs().max().item() for name in names)
