"""Several ranks: uneven data, different paths and experts, replicas, non-finite steps: as one process on all rows."""

import math
import os

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from tests.parity.cells import batches, digest_of
from tests.plain import plain_loop
from tests.recorded import Log, Meeting
from tests.tiny import tiny_model
from tests.toy import ADAMW, WIDTH, Layer, Toy, apart, same_bits, square_loss, toy_batches, toy_config, weights_of
from zft.api import Engine
from zft.engine.fill import get_field

RANK, SIZE = (lambda: int(os.environ["RANK"])), (lambda: int(os.environ["WORLD_SIZE"]))


class ListExperts(Toy):
    """Experts are modules of their own, and only those that a token reaches run: word w goes to expert w % 4."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            layer.forward = _expert_forward.__get__(layer, Layer)

    def forward(self, input_ids):
        return self.head(self.body(self.embed(input_ids), input_ids))

    def body(self, x, words):
        for layer in self.layers:
            x = layer(x, words)
        return x


def _expert_forward(self, x, words):
    out = self.inner(self.norm(x))
    for index, expert in enumerate(self.experts):
        hit = words % 4 == index
        if hit.any():
            out = out.masked_scatter(hit[..., None], torch.tanh(expert(x[hit])))
    return x + out


class RankPath(Toy):
    """Each micro-batch says which layers it goes through, and in which order."""

    def body(self, x, path):
        for index in path.tolist():
            x = self.layers[index](x)
        return x


class Odd(Toy):
    """More ranks than elements, no elements, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.layers[0].register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        self.layers[1].register_parameter("unused", nn.Parameter(torch.ones(1)))
        self.layers[2].inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lonely = nn.ModuleList([One()])
        self._no_split_modules = ("Layer", "One")

    def body(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lonely[0](x)


class One(nn.Module):
    """A unit of one element."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale


def train(kind: type[Toy], shares: list[list[list[dict]]], settings: dict) -> tuple[list[tuple], dict, dict]:
    """On each rank. shares[rank]: its micro-batches, step by step."""
    with Engine(kind(), toy_config(**settings)) as engine:
        results = [engine.step(mbs, loss_fn=square_loss) for mbs in shares[RANK()]]
        named = weights_of(engine)
        computing = {name: t.clone() for unit in engine.stream_units() for name, t in unit.items()}
        return [(r.loss, r.grad_norm, r.skipped) for r in results], named, computing


def assert_equals_plain(kind: type[Toy], shares: list[list[list[dict]]], **settings) -> None:
    """The ranks together equal the plain loop over all their micro-batches."""
    together = [[mb for share in step for mb in share] for step in zip(*shares, strict=True)]
    plain = plain_loop(kind(), together, ADAMW, "fp32", 1.0, square_loss)
    ranks = run_ranks(len(shares), train, kind, shares, settings)
    for results, named, computing in ranks:
        assert [r[0] for r in results] == pytest.approx(plain.losses, abs=1e-6, rel=1e-6)
        assert [r[1] for r in results] == pytest.approx(plain.norms, abs=1e-6, rel=1e-6)
        assert apart(named, plain.weights) <= 1e-6
        assert results == ranks[0][0] and same_bits(named, ranks[0][1]) and same_bits(computing, ranks[0][2])


def deal(batches_of_steps: list[list[dict]], counts: list[int]) -> list[list[list[dict]]]:
    """shares[rank] with counts[rank] micro-batches in each step."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [[mbs[at : at + count] for mbs in batches_of_steps] for at, count in zip(starts, counts, strict=True)]


@pytest.mark.parametrize(
    ("counts", "stage", "wave"),
    [([4, 1], 3, 2), ([4, 1], 0, None), ([0, 3], 3, None), ([0, 3], 1, 2), ([1, 0, 0], 3, None), ([1, 0, 0], 2, None),
     ([3, 2, 1], 3, None), ([3, 2, 1], 1, 2)],
)  # fmt: skip
def test_uneven_numbers_of_micro_batches(counts, stage, wave):
    assert_equals_plain(Toy, deal(toy_batches(sum(counts), 3), counts), stage=stage, wave=wave)


def test_seven_rows_on_two_and_three_ranks():
    """Case 60: batches of two rows, the last of one; loss and evaluation count each row once."""
    rows = batches(7, 1)[0]
    expected = run_ranks(1, _evaluate_and_step, [rows])[0]
    for size in (2, 3):
        for got in run_ranks(size, _evaluate_and_step, [rows[rank::size] for rank in range(size)]):
            assert got == pytest.approx(expected, abs=1e-6)


def _evaluate_and_step(shares: list[list[dict]]) -> tuple[float, float, float]:
    with Engine(tiny_model("llama"), toy_config()) as engine:
        before = engine.evaluate(shares[RANK()])
        result = engine.step(shares[RANK()])
        after = engine.evaluate(shares[RANK()])
        assert before.tokens == after.tokens == result.tokens
        return before.loss, result.loss, after.loss


@pytest.mark.parametrize("activation", ["none", "full"])
def test_ranks_that_reach_different_experts(activation):
    """Case 54: no rank waits for another's experts; an expert that nobody reached keeps its bits."""
    evens = [[{"input_ids": mb["input_ids"] // 2 * 4 % 32} for mb in mbs] for mbs in toy_batches(2, 3)]  # expert 0
    twos = [[{"input_ids": mb["input_ids"] // 4 * 4 + 1} for mb in mbs] for mbs in toy_batches(2, 3)]  # expert 1
    assert_equals_plain(ListExperts, [evens, twos], activation=activation)
    ((_, named, _), _) = run_ranks(2, train, ListExperts, [evens, twos], {})
    start = dict(ListExperts().named_parameters())
    kept = {name for name in start if ".experts." in name and torch.equal(named[name], start[name])}
    assert kept == {name for name in start if ".experts.2." in name or ".experts.3." in name}


@pytest.mark.parametrize("size", [2, 3])
def test_a_mixture_of_experts_equals_one_rank(size):
    """Case 54 on transformers' own model, top 1, with token sets of their own."""
    rows = batches(size, 3)
    for mbs in rows:  # words of its own for each rank
        for index, mb in enumerate(mbs):
            mb["input_ids"] = 3 + (mb["input_ids"] - 3) % 20 + 20 * index
            mb["labels"] = torch.where(mb["labels"] == -100, -100, mb["input_ids"])
    plain = plain_loop(tiny_model("mixtral_top1"), rows, ADAMW, "fp32", 1.0)
    for losses, named in run_ranks(size, _train_tiny, "mixtral_top1", rows, {}):
        assert losses == pytest.approx(plain.losses, abs=1e-6) and apart(named, plain.weights) <= 1e-6


def _train_tiny(arch: str, rows: list[list[dict]], settings: dict) -> tuple[list[float], dict]:
    with Engine(tiny_model(arch), toy_config(**settings)) as engine:
        losses = [engine.step(mbs[RANK() :: SIZE()]).loss for mbs in rows]
        return losses, weights_of(engine)


@pytest.mark.parametrize("paths", [[[0, 1, 2], [0, 2]], [[0, 1, 2], [2, 1, 0]], [[1], []], [[0, 0, 1], [1, 2, 2], [2]]])
def test_ranks_that_take_different_paths_stay_in_step(paths):
    """Layers skipped or repeated or in another order on one rank only: no hang, and the sum is right."""
    shares = [
        [[{**mb, "path": torch.tensor(path, dtype=torch.long)} for mb in mbs] for mbs in toy_batches(2, 3)]
        for path in paths
    ]
    assert_equals_plain(RankPath, shares)


@pytest.mark.parametrize("tiers", [{}, {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"}])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_odd_sizes_on_three_ranks(stage, tiers, tmp_path):
    assert_equals_plain(Odd, deal(toy_batches(3, 3), [1, 1, 1]), stage=stage, nvme_dir=str(tmp_path / "tiers"), **tiers)


def test_dropout_does_not_depend_on_the_number_of_ranks():
    rows = toy_batches(4, 2)
    one = run_ranks(1, _noisy, [rows])[0]
    two = run_ranks(2, _noisy, [[mbs[rank::2] for mbs in rows] for rank in range(2)])
    assert two[0] == pytest.approx(one, abs=1e-6)


def _noisy(shares: list[list[list[dict]]]) -> list[float]:
    with Engine(Toy(dropout=0.3), toy_config()) as engine:
        return [engine.step(mbs, loss_fn=square_loss).loss for mbs in shares[RANK()]]


# replicas


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2, "param_tier": "nvme"}, {"stage": 1, "shard_ranks": 1}])
@pytest.mark.parametrize("compact", [False, True])
def test_replicas_round_alike_from_the_start(settings, compact, tmp_path):
    """Half-way weights round away from zero in the record; a copy of another rank's range must do so, too."""
    settings = {
        **settings,
        "precision": "bf16",
        "nvme_dir": str(tmp_path / "tiers"),
        "optim": type(ADAMW)(compact=compact),
    }
    replicas = run_ranks(2, _half_way_replicas, settings)
    assert replicas[0] == replicas[1]


def _half_way_replicas(settings: dict) -> list[list[int]]:
    model = Toy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.where(torch.rand_like(parameter) < 0.5, 1 + 2**-8, 1 + 3 * 2**-8))
    with Engine(model, toy_config(**settings)) as engine:
        records = engine.parts.records.values()
        return [get_field(r, "hi", 0, r.ranges.hi_numel).view(torch.int16).tolist() for r in records]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_replicas_are_the_same_after_steps(stage, tier, tmp_path):
    """What this rank holds of the others' ranges is refreshed at the next unshard."""
    settings = {"stage": stage, "precision": "bf16", "param_tier": tier, "nvme_dir": str(tmp_path / "tiers")}
    digests = run_ranks(3, _replica_digests, settings)
    assert digests[0] == digests[1] == digests[2]


def _replica_digests(settings: dict) -> list[bytes]:
    found = []
    with Engine(Toy(), toy_config(**settings)) as engine:
        for mbs in toy_batches(3, 3):
            engine.step(mbs[RANK() :: 3], loss_fn=square_loss)
        engine.drain()
        engine.step(toy_batches(3)[0][RANK() :: 3], loss_fn=square_loss)  # refreshes; its own update still waits
        for record in engine.parts.records.values():
            found.append(get_field(record, "hi", 0, record.ranges.hi_numel).view(torch.uint8).numpy().tobytes())
    return found


# non-finite


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_one_ranks_overflow_skips_the_step_on_all(precision, stage):
    """Case 49."""
    settings = {"precision": precision, "stage": stage}
    for skipped, count, scale, digest, expected in run_ranks(2, _overflow, settings):
        assert skipped and count == 1 and digest == expected
        assert scale == (2.0**16 if precision == "fp16" else 1.0)  # the first overflow uses up hysteresis


def _overflow(settings: dict) -> tuple[bool, int, float, str, str]:
    def poisoned(model, mb):
        total, weight = square_loss(model, mb)
        return total * (math.inf if RANK() == 1 else 1.0), weight

    rows = [mbs[RANK() :: 2] for mbs in toy_batches(2, 2)]
    with Engine(Toy(), toy_config(**settings)) as engine:
        engine.step(rows[0], loss_fn=square_loss)
        engine.drain()
        expected = digest_of(engine)
        result = engine.step(rows[1], loss_fn=poisoned)
        engine.drain()
        assert engine.step_count == 1
        return result.skipped, engine.stepper.skipped_count, engine.parts.loss_scale, digest_of(engine), expected


@pytest.mark.parametrize("arch", ["llama", "llama_tied"])
def test_the_norm_is_global_and_before_clipping(arch):
    """Case 50: equal at world 1, 2, 3; a tied matrix counts once."""
    rows = batches(6, 1)
    plain = plain_loop(tiny_model(arch), rows, ADAMW, "fp32", 1e-3)
    for size in (1, 2, 3):
        for norm in run_ranks(size, _norm, arch, rows[0]):
            assert norm == pytest.approx(plain.norms[0], rel=1e-6) and norm > 1e-3


def _norm(arch: str, rows: list[dict]) -> float:
    with Engine(tiny_model(arch), toy_config(max_grad_norm=1e-3)) as engine:
        return engine.step(rows[RANK() :: SIZE()]).grad_norm


# weights are gathered ahead of their visit


def gathers() -> list[str]:
    """A steady step in which a layer computes no further before the next unit's gather has begun."""
    log = Log()
    with Engine(Toy(), toy_config(), record=log) as engine:
        for mbs in toy_batches(SIZE(), 2):
            engine.step(mbs[RANK() :: SIZE()], loss_fn=square_loss)
        log.rows.clear()
        # embed, layers 0 1 2, then 2 1 0 for the backward pass
        meeting, left = Meeting(engine.parts.fetcher, "_gather"), [3, 4, 5, 6, 7, 7]
        for layer in engine.model.layers:
            layer.norm.register_forward_pre_hook(lambda *_: meeting.wait_for(left.pop(0)))
        engine.step(toy_batches(SIZE())[0][RANK() :: SIZE()], loss_fn=square_loss)
        assert not left
    return log.work("collective")


@pytest.mark.parametrize("size", [2, 3])
def test_the_next_unit_is_gathered_while_this_one_computes(size):
    layers = [f"gather layers.{index}#0" for index in range(3)]
    assert run_ranks(size, gathers) == [["gather embed#0", *layers, *reversed(layers)]] * size
