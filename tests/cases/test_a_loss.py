"""Cases a: loss normalisation, padding, masked labels. The reference is a plain loop over all rows in one process."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.nn.functional as F

from tests.cases.rows import chat, sizes, write
from tests.cases.shares import Batch, alone, apart, config, on_ranks, row, rows, stacked
from tests.fixtures.data.tokenizers import bpe_tokenizer
from tests.harness import run_ranks
from tests.plain import plain_loop
from tests.small_run import Shuffled, configured
from tests.tiny import tiny_model
from zft.api import Engine
from zft.config import SGD, ZftError
from zft.data import prepare
from zft.dist import World
from zft.observe.metrics import read
from zft.train.folder import RunFolder
from zft.train.loop import Job, fit


def plain(micro_batches: list[Batch], arch: str = "llama", loss_fn=None) -> dict:
    run = plain_loop(tiny_model(arch), [micro_batches], SGD(lr=0.0, momentum=0.0), loss_fn=loss_fn)
    return {"loss": run.losses[0], "norm": run.norms[0], "gradients": run.gradients[0]}


def assert_equal(found: dict, expected: dict, within: float = 1e-6) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], abs=within)
    assert found["norm"] == pytest.approx(expected["norm"], abs=within)
    assert apart(found["gradients"], expected["gradients"]) <= within


# 1: accumulation


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "gemma2"])
@pytest.mark.parametrize("targets", [(1, 3), (5, 1, 9), (2, 0, 7, 1)], ids=str)
def test_01_accumulation_is_one_batch(arch, targets):
    """Loss and gradients are the sum over all supervised tokens of the step divided by their number, however it is split."""
    parts = rows(*targets)
    together = alone([stacked(parts)], arch)
    split = alone(parts, arch)
    assert split["tokens"] == together["tokens"] == sum(targets)
    assert_equal(split, together)
    assert_equal(split, plain(parts, arch))
    assert_equal(alone([stacked(parts[:-1]), parts[-1]], arch, wave=1), together)


def planted(model, mb: Batch) -> tuple[torch.Tensor, float]:
    """The micro-batch says its own sum of cross-entropies."""
    logits = model(input_ids=mb["input_ids"], attention_mask=mb["attention_mask"]).logits
    return logits.sum() * 0 + mb["ce"].sum(), float((mb["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize(
    ("targets", "ce", "right"), [((1, 3), (4.0, 0.0), 1.0), ((1, 7), (8.0, 0.0), 1.0), ((4, 1), (1, 9), 2)]
)
def test_01_mean_over_tokens_not_mean_of_means(targets, ce, right):
    """A row of one token with cross-entropy 4 and one of three with 0 give 1.0 (a mean of means would give 2.0)."""
    parts = [{**part, "ce": torch.tensor([float(value)])} for part, value in zip(rows(*targets), ce, strict=True)]
    assert alone(parts, loss_fn=planted)["loss"] == alone([stacked(parts)], loss_fn=planted)["loss"] == right


# 3: ranks


@pytest.mark.parametrize(
    ("counts", "settings"),
    [
        ([[2], [6]], {}),
        ([[2], [6]], {"stage": 0}),
        ([[2], [6]], {"precision": "bf16", "reduce_dtype": "float32"}),
        ([[1], [4], [9]], {}),
        ([[1, 3], [5], []], {"stage": 1}),
    ],
    ids=str,
)
def test_03_loss_does_not_depend_on_the_ranks(counts, settings):
    """The count is that of all ranks: ranks with unequal numbers of targets equal one rank with all rows."""
    parts = rows(*(count for share in counts for count in share))
    taken = iter(parts)
    shares = [[next(taken) for _ in share] for share in counts]
    found = on_ranks(shares, **settings)
    assert found["tokens"] == sum(map(sum, counts))
    if settings.get("precision") == "bf16":
        assert_equal(found, alone(parts, precision="bf16"), within=2**-8)
        assert found["loss"] == pytest.approx(alone(parts, precision="bf16")["loss"], abs=1e-6)
    else:
        assert_equal(found, plain(parts))


# 4: custom losses


def smoothed(model, mb: Batch) -> tuple[torch.Tensor, float]:
    logits = model(input_ids=mb["input_ids"], attention_mask=mb["attention_mask"]).logits[:, :-1].flatten(0, 1)
    targets = mb["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum", ignore_index=-100)
    return total, float((targets != -100).sum())


def distilled(model, mb: Batch) -> tuple[torch.Tensor, float]:
    logits = model(input_ids=mb["input_ids"], attention_mask=mb["attention_mask"]).logits[:, :-1]
    kept = mb["labels"][:, 1:] != -100
    teacher = F.one_hot(mb["input_ids"][:, 1:], logits.shape[-1]).float() * 0.9 + 0.1 / logits.shape[-1]
    return F.kl_div(logits.log_softmax(-1)[kept], teacher[kept], reduction="sum"), float(kept.sum())


@pytest.mark.parametrize("loss_fn", [smoothed, distilled])
@pytest.mark.parametrize("targets", [(4, 4, 4, 4), (1, 6, 2), (3,)], ids=str)
def test_04_custom_loss_is_counted(loss_fn, targets):
    """A custom loss returns (sum, weight), so its gradient norm with accumulation is that of the full batch: ratio 1."""
    parts = rows(*targets)
    full, split = alone([stacked(parts)], loss_fn=loss_fn), alone(parts, loss_fn=loss_fn)
    assert split["norm"] / full["norm"] == pytest.approx(1.0, abs=1e-5)
    assert_equal(split, plain(parts, loss_fn=loss_fn))


def caching(model, mb: Batch) -> tuple[torch.Tensor, float]:
    labels = mb["labels"][:, 1:].flatten()
    logits = model(input_ids=mb["input_ids"], use_cache=True).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels, reduction="sum"), float((labels != -100).sum())


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "qwen3"])
def test_04_custom_loss_with_a_cache(arch):
    """A custom loss that asks for a key-value cache is refused where the recompute would extend it, and right elsewhere."""
    parts = rows(4, 2)
    with pytest.raises(ZftError, match="got a key-value cache in a training step.*leave use_cache"):
        alone(parts, arch, loss_fn=caching)
    assert_equal(alone(parts, arch, loss_fn=caching, activation="none"), plain(parts, arch, loss_fn=caching))


@pytest.mark.parametrize("shares", [(2, 2), (1, 2, 1)], ids=str)
def test_04_custom_loss_on_ranks(shares):
    """The weight of a custom loss is summed over ranks, too."""
    parts, at = rows(4, 4, 4, 4), [0, *torch.tensor(shares).cumsum(0).tolist()]
    found = on_ranks([parts[a:b] for a, b in zip(at, at[1:])], loss_fn=smoothed)
    assert_equal(found, plain(parts, loss_fn=smoothed))


def test_04_custom_loss_has_to_weigh_something():
    """A custom loss whose weights are all zero is an error, not a division by zero."""
    with pytest.raises(ZftError, match="returned weight 0"):
        alone(rows(2), loss_fn=lambda model, mb: (model(**{**mb, "labels": None}).logits.sum(), 0.0))


# 5, 6: ends of epochs


@pytest.mark.parametrize(
    ("count", "ranks", "accum", "epochs", "expected"),
    [
        (63, 1, 8, 2, [8, 8, 8, 8, 8, 8, 8, 7] * 2),
        (3, 1, 4, 1, [3]),
        (65, 1, 8, 1, [8] * 8 + [1]),
        (63, 2, 8, 1, [16, 16, 16, 15]),
    ],
)
def test_05_tail_of_an_epoch_is_an_update(tmp_path, count, ranks, accum, epochs, expected):
    """Micro-batches left over at the end of an epoch are an update of their own and never join the next epoch's."""
    prepared = prepare(write(tmp_path / "a.jsonl", [chat(answer=f"of {n}") for n in range(count)]),
                       bpe_tokenizer("chatml"), seq_len=64)  # fmt: skip
    shares = [sizes(prepared.loader(rank, ranks, 1, accum, epochs)) for rank in range(ranks)]
    assert [sum(step) for step in zip(*shares, strict=True)] == expected
    assert prepared.loader(0, ranks, 1, accum, epochs).total_steps == len(expected)


def test_05_tail_is_divided_by_its_own_tokens(tmp_path):
    """The last group's loss is the mean over its own tokens, and 63 rows with accumulation 8 make 8 updates an epoch."""
    answers = [chat(answer="of and to " * (1 + n % 3)) for n in range(63)]
    prepared = prepare(write(tmp_path / "a.jsonl", answers), bpe_tokenizer("chatml"), seq_len=64)
    loader = prepared.loader(0, 1, 1, 8, 2)
    with Engine(tiny_model("llama", vocab_size=700, num_hidden_layers=1), config(optim=SGD(lr=0.0))) as engine:
        sums = []
        while (step := loader.next_step()) is not None:
            result = engine.step(step)
            sums.append((len(step), result.tokens, result.loss))
        assert engine.step_count == 16
        epoch = [engine.evaluate([mb]) for mb in _one_epoch(prepared)]
    for half in (sums[:8], sums[8:]):
        assert sum(tokens for _, tokens, _ in half) == sum(each.tokens for each in epoch), "each row once an epoch"
        total = sum(tokens * loss for _, tokens, loss in half)
        assert total == pytest.approx(sum(each.tokens * each.loss for each in epoch), rel=1e-5)


def _one_epoch(prepared) -> list[Batch]:
    loader, found = prepared.loader(0, 1, 1, 1, 1), []
    while (step := loader.next_step()) is not None:
        found += step
    return found


def updates(path: str, ranks: int, epochs: int) -> int:
    prepared = prepare(path, bpe_tokenizer("chatml"), seq_len=64)
    loader = prepared.loader(int(os.environ["RANK"]), ranks, 1, 1, epochs)
    with Engine(tiny_model("llama", vocab_size=700, num_hidden_layers=1), config()) as engine:
        while (step := loader.next_step()) is not None:
            engine.step(step)
        return engine.step_count


@pytest.mark.parametrize(("count", "ranks", "epochs", "expected"), [(4, 2, 2, 4), (5, 2, 2, 6), (4, 3, 1, 2)])
def test_06_epoch_ends_on_all_ranks_at_once(tmp_path, count, ranks, epochs, expected):
    """Rows, ranks and accumulation of one end with exactly the expected updates on every rank, nobody waits or fails."""
    path = write(tmp_path / "a.jsonl", [chat(answer=f"of {n}") for n in range(count)])
    assert run_ranks(ranks, updates, path, ranks, epochs, timeout_s=60) == [expected] * ranks


# 7: nothing supervised


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "mixtral"])
@pytest.mark.parametrize("length", [10, 1])
def test_07_masked_micro_batch_adds_exactly_nothing(arch, length):
    """A micro-batch without targets among others changes neither loss nor gradient by a bit."""
    parts, masked = rows(3, 5), row(0, 7, length)
    without, beside = alone(parts, arch), alone([parts[0], masked, parts[1]], arch)
    assert beside["loss"] == without["loss"] and beside["tokens"] == without["tokens"]
    assert all(torch.equal(beside["gradients"][name], tensor) for name, tensor in without["gradients"].items())


@pytest.mark.parametrize("shares", [[[3], [0]], [[0], [2], [0]], [[0, 4], []]], ids=str)
def test_07_masked_rank_joins_the_others(shares):
    """A rank all of whose rows are masked takes part in every collective and adds nothing."""
    counts = [count for share in shares for count in share]
    parts = iter(rows(*counts))
    found = on_ranks([[next(parts) for _ in share] for share in shares])
    assert_equal(found, plain([part for part in rows(*counts) if (part["labels"] != -100).any()]))


@pytest.mark.parametrize("masked", [rows(0, 0), rows(0), [row(1, 3, 1)]], ids=["two rows", "one row", "a single token"])
def test_07_masked_step_is_an_error(masked):
    """A step without any target raises before anything is computed and leaves weights and count as they were."""
    with Engine(tiny_model("llama"), config()) as engine:
        with pytest.raises(ZftError, match="no token of this step is supervised"):
            engine.step(masked)
        assert engine.step_count == 0
        assert all(torch.equal(p, tiny_model("llama").get_parameter(name)) for name, p in engine.named_parameters())


@pytest.mark.parametrize(("words", "rows_", "seq_len"), [(30, 5, 32), (30, 1, 16), (9, 3, 8)])
def test_07_masked_data_is_an_error_before_the_model(tmp_path, words, rows_, seq_len):
    """Prompts longer than seq_len leave no target: an error before a weight is read, with the number of such rows."""
    path = write(tmp_path / "a.jsonl", [chat(prompt="the a of and " * words)] * rows_)
    with pytest.raises(ZftError, match=f"no supervised token: of {rows_} rows, {rows_} no target within seq_len"):
        prepare(path, bpe_tokenizer("chatml"), seq_len=seq_len)


# 8: NaN


class Poisoned(Engine):
    """Its second step's loss is `poison` on the last rank."""

    poison, calls = math.nan, 0

    def step(self, micro_batches, lr=None, loss_fn=None):
        self.calls += 1
        before = dict(self.named_parameters())
        bad = self.calls == 2 and self.world.rank == self.world.size - 1
        result = super().step(micro_batches, lr, _poisonous(self.poison if bad else 1.0))
        after = dict(self.named_parameters())
        assert result.skipped == (self.calls == 2) == all(torch.equal(after[name], p) for name, p in before.items())
        return result


def _poisonous(factor: float):
    def loss(model, mb):
        total, weight = smoothed(model, mb)
        return total * factor, weight

    return loss


def logged(folder, poison: float, precision: str) -> tuple[list[dict], int, int]:
    run, world = (
        configured(folder, f"precision={precision}", "train.steps=4", "train.warmup_steps=0"),
        World.from_env("cpu"),
    )
    out = RunFolder(run.out)
    with out.opened(run, False, world):
        pass
    with Poisoned(tiny_model("llama", num_hidden_layers=1), run.engine, world=world) as engine:
        engine.poison = poison
        fit(Job(run, engine, Shuffled(world.rank, world.size), world, out), 4)
        return read(out.metrics), engine.step_count, engine.stepper.skipped_count


@pytest.mark.parametrize(
    ("ranks", "poison", "precision"),
    [(1, math.nan, "bf16"), (1, math.inf, "fp32"), (2, math.nan, "fp32"), (1, math.nan, "fp16")],
)
def test_08_nan_step_is_logged_as_such(tmp_path, ranks, poison, precision):
    """The log shows the non-finite loss, the step is skipped and counted, and no rank's weights move."""
    for metrics, done, skipped in run_ranks(ranks, logged, tmp_path, poison, precision):
        assert (done, skipped) == (3, 1)
        assert not math.isfinite(metrics[1]["loss"]) and not math.isfinite(metrics[1]["grad_norm"])
        assert [line["skipped"] for line in metrics] == [False, True, False, False]
        assert all(math.isfinite(line["loss"]) for line in metrics if line["step"] != 2)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_08_nan_step_can_stop_the_run(poison):
    """With nonfinite=raise the run stops, and the weights are those before the step."""
    with Engine(tiny_model("llama"), config(nonfinite="raise")) as engine:
        with pytest.raises(FloatingPointError, match="weights are untouched"):
            engine.step(rows(3), loss_fn=_poisonous(poison))
        assert all(torch.equal(p, tiny_model("llama").get_parameter(name)) for name, p in engine.named_parameters())
