"""Small plain PyTorch models with unusual habits, for the engine's own tests. No transformers."""

from __future__ import annotations

import torch
from torch import nn

from zft.api import Engine
from zft.config import AdamW, EngineConfig

WIDTH, WORDS = 16, 32
ADAMW = AdamW(lr=1e-2, eps=1e-3, weight_decay=0.1)


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm, self.inner, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.inner(self.norm(x))))


class Toy(nn.Module):
    """Embedding, layers, head. Subclasses replace `body`."""

    _no_split_modules = ("Layer",)

    def __init__(self, layers: int = 3, dropout: float = 0.0, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, **extra):
        return self.head(self.body(self.embed(input_ids), **extra))

    def body(self, x, **_extra):
        for layer in self.layers:
            x = layer(x)
        return x


def square_loss(model: nn.Module, mb: dict) -> tuple[torch.Tensor, float]:
    """(sum, weight) of a smooth loss without labels."""
    out = model(**mb)
    return (out - 0.3).square().sum(), float(out.numel())


def toy_batches(count: int, steps: int = 1, **extra) -> list[list[dict]]:
    """`count` micro-batches for each step, all different."""
    made = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 + step)
        rows = [torch.randint(0, WORDS, (1 + i % 2, 5), generator=generator) for i in range(count)]
        made.append([{"input_ids": ids, **extra} for ids in rows])
    return made


def toy_config(**settings) -> EngineConfig:
    return EngineConfig(**{"precision": "fp32", "optim": ADAMW, "timeout_s": 30.0, **settings})


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(engine.named_parameters())


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a if a[name].numel())
