"""What each rank runs in the cases of kind g."""

from __future__ import annotations

import copy
import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.adapters import gradients
from tests.parity.cells import batches
from tests.tiny import tiny_model, tiny_tokenizer
from tests.toy import WIDTH, Toy, square_loss, toy_batches, toy_config
from zft.api import Engine
from zft.config import AdamW, TrainConfig
from zft.data import prepare
from zft.dist import RankError, World
from zft.train.evaluate import mean_loss

ADAMW = AdamW(lr=1e-2, eps=1e-3)


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train_experts(steps: list[list[dict]], working: int) -> tuple[list[float], dict, dict]:
    """(losses, gradients of the first step, weights); rows are dealt to the first `working` ranks."""
    rank, _ = rank_and_size()
    with Engine(tiny_model("mixtral_top1"), toy_config(optim=ADAMW)) as engine:
        losses, first = [], None
        for rows in steps:
            losses.append(engine.step(rows[rank::working] if rank < working else []).loss)
            first = first or gradients(engine)
        return losses, first, dict(engine.named_parameters())


class ExpertLayer(nn.Module):
    """Experts as modules of their own, of which each row takes one: what models with custom code still do."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, expert):
        return x + torch.tanh(self.experts[int(expert)](x))


class Experts(Toy):
    _no_split_modules = ("ExpertLayer",)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer() for _ in range(3))

    def body(self, x, expert):
        for layer in self.layers:
            x = layer(x, expert)
        return x


def expert_rows() -> list[list[dict]]:
    return [[{**mb, "expert": torch.tensor(i)} for i, mb in enumerate(mbs)] for mbs in toy_batches(3, 2)]


def train_module_experts() -> dict:
    rank, size = rank_and_size()
    torch.manual_seed(0)
    with Engine(Experts(), toy_config()) as engine:
        for rows in expert_rows():
            engine.step(rows[rank::size], loss_fn=square_loss)
        return dict(engine.named_parameters())


PATHS = {"skipped": (0, 2), "twice": (0, 1, 1, 2), "swapped": (2, 1, 0)}


def take_path(model: nn.Module, layers: list[nn.Module], path: tuple[int, ...]) -> None:
    model.model.layers = nn.ModuleList(layers[i] for i in path)
    model.model.config.num_hidden_layers = len(path)


def train_on_paths() -> dict[str, tuple[list[float], list[float]]]:
    """{path: (training losses, evaluation losses between the steps)}; odd steps take the path through the layers."""
    rank, size = rank_and_size()
    found = {}
    for name, path in PATHS.items():
        losses, evaluations = found[name] = [], []
        model = tiny_model("llama", num_hidden_layers=3)
        with Engine(model, toy_config()) as engine:
            layers = list(model.model.layers)
            for number, mbs in enumerate(batches(3, 4)):
                take_path(model, layers, path if number % 2 else (0, 1, 2))
                losses.append(engine.step(mbs[rank::size]).loss)
                take_path(model, layers, (0, 1, 2))
                evaluations.append(engine.evaluate(mbs[rank::size]).loss)
    return found


class Branching(Toy):
    """Which layers a row takes depends on its data."""

    def body(self, x, skip):
        for index, layer in enumerate(self.layers):
            x = x if index == int(skip) else layer(x)
        return x


def branching_rows() -> list[list[dict]]:
    return [[{**mb, "skip": torch.tensor(i)} for i, mb in enumerate(mbs)] for mbs in toy_batches(3, 2)]


def train_branches() -> list[float]:
    rank, size = rank_and_size()
    with Engine(Branching(), toy_config()) as engine:
        return [engine.step(rows[rank::size], loss_fn=square_loss).loss for rows in branching_rows()]


def disagree(kind: str) -> float:
    """Ranks differ in what they call, or how often; seconds until this rank's error."""
    rank, _ = rank_and_size()
    rows = toy_batches(2)[0]
    with Engine(Toy(), toy_config(timeout_s=5.0)) as engine:
        engine.step(rows[rank::2], loss_fn=square_loss)
        if rank == 1 and kind == "fewer":
            time.sleep(8)
            return 0.0
        started = time.monotonic()
        with pytest.raises(RankError):
            if rank == 1:
                list(engine.named_parameters())
            engine.step(rows[rank::2], loss_fn=square_loss)
        return time.monotonic() - started


def generate_and_train(stops: list[int], longest: int) -> tuple[int, int]:
    """(this rank's forwards, those it took part in) of writing a token each and training on the last."""
    rank, _ = rank_and_size()
    own = 0

    def loss(model, mb):
        nonlocal own
        ids, stop = mb["input_ids"], int(mb["stop"])
        while True:
            own += 1
            done = own == min(stop, longest)
            with torch.set_grad_enabled(done):
                out = model(input_ids=ids)
            if done:
                return (out - 0.3).square().sum(), float(out.numel())
            ids = torch.cat([ids, out[:, -1:].argmax(-1)], dim=1)

    rows = [{"input_ids": torch.tensor([[3, 4]]), "stop": torch.tensor(stops[rank])}] if stops[rank] else []
    with Engine(Toy(), toy_config()) as engine:
        joined, counted = [], []
        unshard, end_forward = engine.parts.sharder.unshard, engine.parts.order.end
        engine.parts.sharder.unshard = lambda unit: (joined.append(unit.name), unshard(unit))[1]
        engine.parts.order.end = lambda: (counted.append(joined.count("layers.0")), end_forward())[1]
        engine.step(rows, loss_fn=loss)
        engine.step(toy_batches(2)[0][rank % 2 :][:1], loss_fn=square_loss)
        assert len(set(run_sum(engine))) == 1
    return own, counted[0]


def run_sum(engine: Engine) -> list[float]:
    """A number of every rank's weights, from all ranks."""
    mine = sum(value.double().sum().item() for _, value in engine.named_parameters())
    return [values[0] for values in engine.world.gather_floats([mine])]


def generate_outside() -> tuple[str, float]:
    rank, _ = rank_and_size()
    with Engine(tiny_model("llama"), toy_config()) as engine:
        started = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            engine.model.generate(torch.tensor([[3] * (2 + rank)]), max_new_tokens=2 + 3 * rank, do_sample=False)
        return str(caught.value), time.monotonic() - started


class Peeking(Toy):
    """Uses a weight outside of the module that owns it."""

    how = "sum"

    def body(self, x):
        for layer in self.layers:
            x = layer(x)
        weight = self.layers[0].inner.weight
        if self.how == "sum":
            return x * weight.sum()
        if self.how == "linear":
            return F.linear(x, weight)
        if self.how == "number":
            return x * float(weight.norm())
        return x * copy.deepcopy(self.layers[0]).inner.weight.detach().mean()


HOWS = ("sum", "linear", "number", "copy")


def peek(stage: int) -> list[str]:
    """What each way of reading says, each with an engine of its own."""
    rank, size = rank_and_size()
    texts = []
    for how in HOWS:
        model = Peeking()
        model.how = how
        with Engine(model, toy_config(stage=stage)) as engine:
            assert model.layers[0].inner.weight.shape == (WIDTH, WIDTH), "its shape is true all the same"
            with pytest.raises(RuntimeError) as caught:
                engine.step(toy_batches(size)[0][rank::size], loss_fn=square_loss)
            texts.append(str(caught.value))
    return texts


class Keeping(Toy):
    """Keeps a weight while its module has it, and uses it later."""

    def body(self, x):
        inner = self.layers[0].inner
        forward = inner.forward

        def keeping(y):
            self.kept = inner.weight
            return forward(y)

        inner.forward = keeping
        for layer in self.layers:
            x = layer(x)
        del inner.forward
        return x + self.kept.sum()


def keep() -> str:
    """What comes of a step with a kept weight: an error, or the loss."""
    rank, size = rank_and_size()
    with Engine(Keeping(), toy_config()) as engine:
        try:
            return str(engine.step(toy_batches(size)[0][rank::size], loss_fn=square_loss).loss)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def read_outside(folder: str) -> dict[str, str]:
    """What comes of a model that is used as if no engine held its weights."""
    model = tiny_model("llama")
    ids, found = torch.tensor([[3, 4, 5]]), {}
    calls = {
        "forward": lambda: model(ids),
        "layer": lambda: model.model.layers[0].mlp(torch.zeros(1, 3, 32)).sum().item(),
        "value": lambda: model.lm_head.weight.sum().item(),
        "numpy": lambda: model.lm_head.weight.detach().numpy(),
        "save": lambda: model.save_pretrained(folder),
    }
    with Engine(model, toy_config()) as engine:
        for name, call in calls.items():
            try:
                call()
                found[name] = ""
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        right = dict(engine.named_parameters())
    plain = tiny_model("llama")
    found["named_parameters"] = str(all(torch.equal(right[n], p) for n, p in plain.named_parameters()))
    return found


def train_and_evaluate(path: str, micro_batch_size: int) -> tuple[float, int, list[float], list[int]]:
    """(evaluation loss, its tokens, losses of two epochs, micro-batches of each step on this rank)."""
    prepared = prepare(path, tiny_tokenizer(64), seq_len=64, eval_data=path)
    world = World.from_env("cpu")
    run = SimpleNamespace(train=TrainConfig(micro_batch_size=micro_batch_size, grad_accum_steps=1))
    with Engine(tiny_model("llama"), toy_config(), world=world) as engine:
        evaluation = mean_loss(prepared.eval, run, world, engine)
        loader = prepared.loader(world.rank, world.size, micro_batch_size, 1, 2)
        losses, counts = [], []
        while (step := loader.next_step()) is not None:
            losses.append(engine.step(step).loss)
            counts.append(len(step))
    return evaluation.loss, evaluation.tokens, losses, counts
