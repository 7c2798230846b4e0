"""Packing, order and the loader: every row once, at any world size, in an order that the seed alone decides."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.data.tokenizers import bpe_tokenizer
from zft.config import ZftError
from zft.data import DataOptions, prepare
from zft.data.collate import packed, padded
from zft.data.order import epoch_order, group_by_length, quotas
from zft.data.pack import best_fit, join, one_each


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Textbook best-fit decreasing: look at every bin."""
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [(capacity - sum(lengths[j] for j in b), b) for b in bins]
        fitting = [room for room, _ in rooms if room >= lengths[i]]
        if fitting:
            next(b for room, b in rooms if room == min(fitting)).append(i)
        else:
            bins.append([i])
    return bins


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 17), max_size=40), capacity=st.integers(17, 40))
def test_best_fit(lengths, capacity):
    sequences = np.arange(len(lengths)) * 3 + 1
    items = best_fit(sequences, np.asarray(lengths, np.int64), capacity)
    assert sorted(items.members.tolist()) == sequences.tolist()
    by_sequence = dict(zip(sequences.tolist(), lengths, strict=True))
    fills = [sum(by_sequence[s] for s in items[i].tolist()) for i in range(len(items))]
    assert all(fill <= capacity for fill in fills)
    # which of several equally full bins is taken may differ, how full they end up may not
    slow = [sum(lengths[i] for i in b) for b in slow_best_fit(lengths, capacity)]
    assert sorted(fills) == sorted(slow)


def test_items_join_and_sum():
    lengths = np.asarray([5, 7, 2, 9])
    items = join([one_each(np.asarray([0, 1])), best_fit(np.asarray([2, 3]), lengths[2:], 20)])
    assert [items[i].tolist() for i in range(len(items))] == [[0], [1], [3, 2]]
    assert items.sums(lengths).tolist() == [5, 7, 11]
    assert len(one_each(np.zeros(0, np.int64)).sums(lengths)) == 0


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=4), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_order_is_a_permutation_that_seed_and_epoch_decide(counts, seed, epoch):
    order = epoch_order(counts, None, seed, epoch)
    assert sorted(order.tolist()) == list(range(sum(counts)))
    assert (order == epoch_order(counts, None, seed, epoch)).all()
    if sum(counts) > 20:
        assert (order != epoch_order(counts, None, seed, epoch + 1)).any()
        assert (order != epoch_order(counts, None, seed + 1, epoch)).any()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_weights_hold_in_every_epoch_and_items_are_drawn_equally(data, seed):
    counts = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=len(counts), max_size=len(counts)))
    shares = quotas(counts, weights)
    assert sum(shares) == sum(counts)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - sum(counts) * weight / sum(weights)) < 1
    drawn = Counter()
    first = np.cumsum([0, *counts])
    for epoch in range(4):
        order = epoch_order(counts, weights, seed, epoch)
        for source, share in enumerate(shares):
            assert ((order >= first[source]) & (order < first[source + 1])).sum() == share
        drawn.update(order.tolist())
    for source, count in enumerate(counts):
        times = [drawn[i] for i in range(first[source], first[source] + count)]
        assert max(times) - min(times) <= 1


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_grouping_by_length_keeps_every_item_and_saves_padding(count, seed):
    rng = np.random.default_rng(seed)
    lengths, order = rng.integers(1, 2000, count), rng.permutation(count)
    grouped = group_by_length(order, lengths, seed, 0)
    assert sorted(grouped.tolist()) == list(range(count))
    if count >= 1024:

        def padding(order):
            rows = lengths[order[: count // 8 * 8]].reshape(-1, 8)
            return (rows.max(1, keepdims=True) - rows).sum()

        assert padding(grouped) < 0.5 * padding(order)


def test_padding_follows_the_length_and_not_the_id():
    ids = np.asarray([5, 6, 2, 2], np.int32)  # 2 is EOS and pad at once
    batch = padded([(ids, np.asarray([0, 1, 1, 1])), (ids[:3], np.asarray([0, 0, 1]))], pad_id=2)
    assert batch["input_ids"].tolist() == [[5, 6, 2, 2], [5, 6, 2, 2]]
    assert batch["labels"].tolist() == [[-100, 6, 2, 2], [-100, -100, 2, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_packed_positions_restart():
    a, b, c = (np.arange(n, dtype=np.int32) for n in (3, 2, 4))
    ones = [np.asarray([0] + [1] * (len(x) - 1)) for x in (a, b, c)]
    rows = [[(a, ones[0]), (b, ones[1])], [(c, ones[2])]]
    batch = packed(rows, pad_id=9, flat=False)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, 1], [-100, 1, 2, 3, -100]]
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 9]]
    assert "attention_mask" not in batch
    flat = packed(rows, pad_id=9, flat=True)
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    words = "the a of and to in is that it was".split()
    rows = [{"text": " ".join(words[: 1 + (n * 7) % 10]) + f" {n}"} for n in range(63)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def steps(prepared, world: int, epochs=2, accum=2, start: dict | None = None, stop: int | None = None):
    """(first ids of every row of each step over all ranks, tokens of each step, state at the end)."""
    loaders = [prepared.loader(rank, world, 2, accum, epochs) for rank in range(world)]
    for loader in loaders:
        if start:
            loader.load_state_dict(json.loads(json.dumps(start)))
    seen, tokens = [], []
    while stop is None or len(seen) < stop:
        shares = [loader.next_step() for loader in loaders]
        if shares[0] is None:
            assert all(share is None for share in shares)
            break
        assert len({loader.step_tokens for loader in loaders}) == 1
        batches = [batch for share in shares for batch in share]
        counted = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert counted == loaders[0].step_tokens
        seen.append([tuple(row.tolist()) for batch in batches for row in batch["input_ids"]])
        tokens.append(counted)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return seen, tokens, states[0]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("pack", [False, True])
def test_every_row_once_an_epoch_at_any_world_size(file, world, pack):
    prepared = prepare(file, bpe_tokenizer("chatml"), DataOptions(pack=pack), seq_len=40)
    seen, tokens, _ = steps(prepared, world)
    items = len(prepared.epochs.items)
    per_epoch = -(-items // (4 * world))
    assert len(seen) == 2 * per_epoch == prepared.loader(0, world, 2, 2, 2).total_steps
    assert [len(step) for step in seen[:per_epoch]] == [4 * world] * (per_epoch - 1) + [
        items - 4 * world * (per_epoch - 1)
    ]
    assert sum(tokens) == 2 * prepared.report.supervised_tokens
    # the items come in the same order at any world size
    loader, drawn = prepared.loader(0, world, 2, 2, 2), []
    while (step := loader.next_items()) is not None:
        drawn += step.tolist()
    assert drawn == [*prepared.epochs.order(0), *prepared.epochs.order(1)]


def test_last_group_of_an_epoch_is_a_step_of_its_own(file):
    prepared = prepare(file, bpe_tokenizer("chatml"), seq_len=40)
    loader = prepared.loader(0, 1, 1, 8, 2)
    sizes = []
    while (step := loader.next_step()) is not None:
        sizes.append(len(step))
    assert sizes == [8, 8, 8, 8, 8, 8, 8, 7] * 2
    assert loader.total_steps == 16 and loader.steps_per_epoch == 8
    few = prepare(file, bpe_tokenizer("chatml"), DataOptions(max_rows=3), seq_len=40).loader(0, 1, 1, 4, 1)
    assert few.total_steps == 1 and len(few.next_step()) == 3 and few.next_step() is None


def test_more_ranks_than_rows(file):
    prepared = prepare(file, bpe_tokenizer("chatml"), DataOptions(max_rows=1), seq_len=40)
    shares = [prepared.loader(rank, 3, 1, 1, 1).next_step() for rank in range(3)]
    assert [len(share) for share in shares] == [1, 0, 0]


@pytest.mark.parametrize("then,now", [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("options", [{}, {"pack": True}, {"length_grouped": True}])
def test_resume_at_another_world_size_consumes_every_row_once(file, then, now, options):
    prepared = prepare(file, bpe_tokenizer("chatml"), DataOptions(**options), seq_len=40)
    before, tokens, state = steps(prepared, then, stop=3)
    after, more, _ = steps(prepared, now, start=state)
    whole, _, _ = steps(prepared, 1)

    def rows(seen):  # without the padding that other neighbours bring
        return Counter(tuple(t for t in row if t != 0) for step in seen for row in step)

    assert rows(before) + rows(after) == rows(whole)
    if then == now:
        assert before + after == steps(prepared, then)[0]
    assert sum(tokens) + sum(more) == 2 * prepared.report.supervised_tokens


def test_position_in_the_middle_of_the_second_epoch(file):
    prepared = prepare(file, bpe_tokenizer("chatml"), seq_len=40)
    whole, _, _ = steps(prepared, 1, epochs=3)
    for stop in (16, 17, 20, 32):  # the end of an epoch, and after it
        before, _, state = steps(prepared, 1, epochs=3, stop=stop)
        after, _, _ = steps(prepared, 1, epochs=3, start=state)
        assert before + after == whole


def test_fractional_epochs_and_endless(file):
    prepared = prepare(file, bpe_tokenizer("chatml"), seq_len=40)
    for epochs in (0.1, 0.5, 1.0, 1.3, 2.5):
        loader = prepared.loader(0, 1, 2, 2, epochs)
        rows = done = 0
        while (step := loader.next_step()) is not None:
            rows += sum(len(batch["input_ids"]) for batch in step)
            done += 1
        assert (done, rows) == (loader.total_steps, round(epochs * 63))
    loader = prepared.loader(0, 1, 2, 2, None)
    assert loader.total_steps is None and all(loader.next_step() for _ in range(40))


def test_state_of_other_data_is_refused(file, tmp_path):
    state = prepare(file, bpe_tokenizer("chatml"), seq_len=40).loader().state_dict()
    other = prepare(file, bpe_tokenizer("chatml"), DataOptions(max_rows=62), seq_len=40).loader()
    with pytest.raises(ZftError, match="data or data_options changed since the checkpoint"):
        other.load_state_dict(state)
    seeded = prepare(file, bpe_tokenizer("chatml"), seq_len=40, seed=1).loader()
    with pytest.raises(ZftError, match=r"train.seed changed since the checkpoint \(then 0, now 1\)"):
        seeded.load_state_dict(state)


def test_bad_loader_arguments(file):
    prepared = prepare(file, bpe_tokenizer("chatml"), seq_len=40)
    for arguments, reason in [((0, 1, 0, 1), "micro_batch_size"), ((0, 1, 1, 0), "grad_accum_steps")]:
        with pytest.raises(ZftError, match=reason):
            prepared.loader(*arguments)
    with pytest.raises(ZftError, match="epochs"):
        prepared.loader(epochs=0)
