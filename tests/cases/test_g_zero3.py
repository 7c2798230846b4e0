"""Cases g: ranks that hold a share of every weight. Nothing hangs, and nothing reads a weight that isn't there."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import torch.nn.functional as F

from tests.cases.zero3_ranks import (
    ADAMW,
    PATHS,
    Branching,
    Experts,
    branching_rows,
    disagree,
    expert_rows,
    generate_and_train,
    generate_outside,
    keep,
    peek,
    read_outside,
    take_path,
    train_and_evaluate,
    train_branches,
    train_experts,
    train_module_experts,
    train_on_paths,
)  # fmt: skip
from tests.harness import run_ranks
from tests.parity.cells import batches
from tests.plain import plain_loop
from tests.tiny import tiny_model, tiny_tokenizer
from tests.toy import square_loss, toy_config
from zft.data import prepare

CLOSE = 1e-6


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=CLOSE, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


# 54


def chosen_experts(token: int) -> tuple[int, ...]:
    """Expert of each layer for a row of nothing but `token`: its attention is the same everywhere, so is its expert."""
    model, ids = tiny_model("mixtral_top1"), torch.full((1, 6), token)
    with torch.no_grad():
        logits = model(ids, output_router_logits=True, use_cache=False).router_logits
    found = [set(layer.argmax(-1).flatten().tolist()) for layer in logits]
    assert all(len(experts) == 1 for experts in found)
    return tuple(experts.pop() for experts in found)


def disjoint_tokens(count: int) -> dict[int, tuple[int, ...]]:
    """{token: its experts}: `count` tokens of which no two share an expert in any layer."""
    chosen: dict[int, tuple[int, ...]] = {}
    for token in range(3, 64):
        experts = chosen_experts(token)
        if all(mine != theirs for others in chosen.values() for mine, theirs in zip(experts, others, strict=True)):
            chosen[token] = experts
        if len(chosen) == count:
            return chosen
    raise AssertionError(f"found {chosen} only")


def row(token: int, length: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.full((1, length), token)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(("size", "working"), [(1, 1), (2, 2), (3, 3), (3, 2)])
def test_54_ranks_that_hit_disjoint_experts(size, working):
    """Ranks that reach different experts finish with one rank's result; an unreached expert has a zero gradient.

    Not reported: a rank without any rows, and experts that change from step to step.
    """
    tokens = disjoint_tokens(3)
    first, later = list(tokens)[: max(working, 2)], list(tokens)[1:]
    steps = [[row(token, 6 + i) for i, token in enumerate(names)] for names in (first, later)]
    plain = plain_loop(tiny_model("mixtral_top1"), steps, ADAMW, max_grad_norm=1.0)
    for losses, found, weights in run_ranks(size, train_experts, steps, working, timeout_s=120):
        assert losses == pytest.approx(plain.losses, abs=CLOSE)
        assert_close(found, plain.gradients[0])
        assert_close(weights, plain.weights)
        for layer in range(2):
            reached = {tokens[token][layer] for token in first}
            for kind in ("gate_up_proj", "down_proj"):
                experts = found[f"model.layers.{layer}.mlp.experts.{kind}"]
                assert {e for e in range(4) if experts[e].abs().max() > 0} == reached


@pytest.mark.parametrize("size", [1, 2, 3])
def test_54_experts_that_are_modules(size):
    """Experts as separate modules, each reached on one rank only, or on none: the plain model's weights."""
    torch.manual_seed(0)
    plain = plain_loop(Experts(), expert_rows(), toy_config().optim, max_grad_norm=1.0, loss_fn=square_loss)
    start = {name: value.detach() for name, value in Experts().named_parameters()}
    for weights in run_ranks(size, train_module_experts):
        assert_close(weights, plain.weights)
    assert start.keys() == plain.weights.keys()


# 56


def plain_on_paths(path: tuple[int, ...]) -> list[float]:
    model = tiny_model("llama", num_hidden_layers=3)
    layers, calls = list(model.model.layers), iter(range(1000))
    every = list(model.named_parameters())

    def choose(module, *_):
        take_path(module, layers, path if next(calls) // 3 % 2 else (0, 1, 2))

    model.register_forward_pre_hook(choose)
    model.named_parameters = lambda **_: every  # a layer that is left out is still the model's
    return plain_loop(model, batches(3, 4), toy_config().optim, max_grad_norm=1.0).losses


@functools.cache
def paths_on_one_rank() -> dict[str, tuple[list[float], list[float]]]:
    return run_ranks(1, train_on_paths)[0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_56_branches_that_depend_on_the_step(size):
    """A layer that odd steps skip, and evaluation between steps, give a plain loop's losses.

    Not reported: a layer that odd steps take twice, and layers in another order.
    """
    ranks = [paths_on_one_rank()] if size == 1 else run_ranks(size, train_on_paths)
    for name, path in PATHS.items():
        expected, alone = plain_on_paths(path), paths_on_one_rank()[name][1]
        assert len(set(alone)) == 4, "evaluation sees each step's weights"
        for found in ranks:
            assert found[name] == (pytest.approx(expected, abs=CLOSE), pytest.approx(alone, abs=CLOSE)), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_56_branches_that_depend_on_the_row(size):
    """Ranks whose rows take different layers agree on the order of the layers and get a plain loop's losses."""
    plain = plain_loop(Branching(), branching_rows(), toy_config().optim, max_grad_norm=1.0, loss_fn=square_loss)
    for losses in run_ranks(size, train_branches):
        assert losses == pytest.approx(plain.losses, abs=CLOSE)


@pytest.mark.parametrize("kind", ["fewer", "other"])
def test_56_ranks_that_disagree_get_an_error(kind):
    """Ranks that make different calls, or different numbers of calls, get an error within the time-out."""
    assert max(run_ranks(2, disagree, kind, timeout_s=60, group_timeout_s=5)) < 15


# 57


@pytest.mark.parametrize(
    ("stops", "longest", "lengths"),
    [([2, 5], 8, [2, 5]), ([5], 8, [5]), ([0, 3, 1], 8, [0, 3, 1]), ([99, 1], 8, [8, 1])],
)
def test_57_generation_that_stops_at_different_lengths(stops, longest, lengths):
    """Ranks that stop writing earlier take part in the others' forwards, so that none waits for ever.

    Not reported: a rank that writes nothing at all, and one that never stops by itself.
    """
    found = run_ranks(len(stops), generate_and_train, stops, longest, timeout_s=60)
    assert [own for own, _ in found] == lengths
    assert [joined for _, joined in found] == [max(lengths)] * len(stops)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_57_generation_outside_of_a_step_is_refused(size):
    """`generate` of a sharded model outside of a step is refused at once on every rank; an export is what generates."""
    for text, seconds in run_ranks(size, generate_outside):
        assert "was called outside of an engine step" in text and "an export" in text
        assert seconds < 10


# 58


@pytest.mark.parametrize(("stage", "size"), [(3, 1), (0, 2), (3, 2), (3, 3)])
def test_58_a_weight_used_outside_of_its_module(stage, size):
    """A weight read outside of its module raises on every rank, at any stage: never a finite wrong number.

    Not reported: a number made of it, and a copy of its module.
    """
    found = run_ranks(size, peek, stage)
    for texts in zip(*found, strict=True):
        assert any("meta" in text for text in texts), texts
        assert all("meta" in text or "failed; this rank" in text for text in texts), texts


@pytest.mark.parametrize("size", [1, 2])
def test_58_a_weight_kept_past_its_module(size):
    """A weight that a module hands out to be used later is an error or not a number by then, never what lies there."""
    for said in run_ranks(size, keep):
        assert "Error" in said or said == "nan", said


@pytest.mark.parametrize("size", [1, 2])
def test_58_a_model_used_past_its_engine(size, tmp_path):
    """The model without its engine, a part of it, its values and its own save raise; the engine's reader is right."""
    ranks = run_ranks(size, read_outside, str(tmp_path / "out"))
    assert any([found.pop("save") for found in ranks]), "transformers saves on one rank"
    assert not list(tmp_path.rglob("*.safetensors"))
    for found in ranks:
        assert found.pop("named_parameters") == "True"
        assert all(found.values()), found
        assert "outside of an engine step" in found["forward"]


# 60


def chats(count: int) -> str:
    """Lines of conversations, all different."""
    lines = []
    for i in range(count):
        user, answer = {"role": "user", "content": "ab" * (i + 1)}, {"role": "assistant", "content": "cd" * (1 + i % 3)}
        lines.append(json.dumps({"messages": [user, answer]}) + "\n")
    return "".join(lines)


def plain_evaluation(path: str) -> tuple[float, int]:
    """Mean over the targets of every row, each row by itself."""
    store, model = prepare(path, tiny_tokenizer(64), seq_len=64).epochs.store, tiny_model("llama")
    total, tokens = 0.0, 0
    for index in range(len(store.lengths)):
        ids = torch.tensor(store.ids(index).tolist())
        labels = torch.where(torch.tensor(store.mask(index).tolist()) == 1, ids, -100)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += F.cross_entropy(logits, labels[1:], reduction="sum").item()
        tokens += int((labels[1:] != -100).sum())
    return total / tokens, tokens


@pytest.mark.parametrize(("rows", "batch", "size"), [(1, 1, 1), (1, 1, 3), (7, 2, 2), (7, 2, 3), (2, 2, 3), (5, 4, 3)])
def test_60_fewer_rows_than_ranks_and_uneven_batches(rows, batch, size, tmp_path):
    """A rank without rows takes part with none: no hang, no copies; every row counts once, in evaluation as well.

    Not reported: a whole batch on one of three ranks only, and a batch that none but the last rank lacks.
    """
    path = tmp_path / "rows.jsonl"
    path.write_text(chats(rows))
    loss, tokens = plain_evaluation(str(path))
    outcomes = run_ranks(size, train_and_evaluate, str(path), batch)
    for mine in outcomes:
        assert mine[:2] == (pytest.approx(loss, abs=CLOSE), tokens)
        assert mine[2] == outcomes[0][2]
    steps = -(-rows // (batch * size))
    assert all(len(mine[2]) == 2 * steps for mine in outcomes)
    assert outcomes[0][2][0] == pytest.approx(loss, abs=CLOSE) if steps == 1 else True
    taken = [sum(mine[3][step] for mine in outcomes) for step in range(2 * steps)]
    whole, rest = divmod(rows, batch * size)
    assert taken == ([size] * whole + [-(-rest // batch)] * (rest > 0)) * 2
