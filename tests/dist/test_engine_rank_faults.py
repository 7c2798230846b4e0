"""A rank that raises, dies, hangs or has a full disk: an error on every rank in time, and a clean step afterwards."""

import errno
import os
import time

import pytest
import torch

from tests.harness import RanksFailed, run_ranks, run_ranks_to_end
from tests.parity.cells import digest_of
from tests.toy import Toy, square_loss, toy_batches, toy_config
from zft.api import Engine
from zft.config import ZftError
from zft.dist import RankError, World


class Broken(Exception):
    pass


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Broken("in the backward pass")


class Fragile(Toy):
    fuse = None
    """Where this rank fails: layer index, or "backward"."""

    def body(self, x):
        for index, layer in enumerate(self.layers):
            if index == self.fuse:
                raise Broken(f"ahead of layer {index}")
            x = layer(x)
            if index == 1 and self.fuse == "backward":
                x = Explode.apply(x)
        return x


def bad_loss(model, mb):
    total, weight = square_loss(model, mb)
    raise Broken("in the loss")


def fail_and_go_on(settings: dict, where: object, failing: int) -> tuple[str, str, str]:
    """(error, digest after the clean steps, digest of the same steps without the failure)."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rows = [mbs[rank::size] for mbs in toy_batches(size, 4)]
    digests, error = [], ""
    for fails in (True, False):
        with Engine(Fragile(dropout=0.1), toy_config(**settings)) as engine:
            engine.step(rows[0], loss_fn=square_loss)
            if fails:
                engine.model.fuse = where if rank == failing else None
                loss = bad_loss if where == "loss" and rank == failing else square_loss
                with pytest.raises((Broken, RankError)) as caught:
                    engine.step(rows[3], loss_fn=loss)
                error, engine.model.fuse = f"{type(caught.value).__name__}: {caught.value}", None
            engine.step(rows[1], loss_fn=square_loss)
            engine.step(rows[2], loss_fn=square_loss)
            engine.drain()
            digests.append(digest_of(engine))
    return error, *digests


@pytest.mark.parametrize(
    ("where", "size", "failing", "settings"),
    [
        (0, 2, 0, {}),
        (2, 3, 1, {"stage": 1}),
        (1, 2, 1, {"stage": 0, "wave": 1}),
        ("backward", 2, 1, {}),
        ("backward", 3, 2, {"stage": 2, "activation": "none"}),
        ("loss", 2, 0, {"precision": "bf16"}),
        ("loss", 3, 2, {"activation": "offload"}),
    ],
)
def test_every_rank_raises_and_the_next_step_is_clean(where, size, failing, settings):
    outcomes = run_ranks(size, fail_and_go_on, settings, where, failing)
    for rank, (error, after, expected) in enumerate(outcomes):
        if rank == failing:
            assert error.startswith("Broken: ")
        else:
            assert error.startswith(f"RankError: rank {failing} failed")
        assert after == expected


def die(when: str) -> str:
    """Rank 1 ends without a word; the others say what they see, and how soon."""
    rank = int(os.environ["RANK"])

    class Deadly(Toy):
        def body(self, x):
            for index, layer in enumerate(self.layers):
                if rank == 1 and index == 1 and when == "forward":
                    os._exit(9)
                x = layer(x)
            return x

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if rank == 1 and when == "backward":
                os._exit(9)
            return gradient

    def loss(model, mb):
        total, weight = square_loss(model, mb)
        return Last.apply(total), weight

    rows = toy_batches(3, 2)
    with Engine(Deadly(), toy_config(timeout_s=20.0)) as engine:
        started = time.monotonic()
        with pytest.raises((RankError, RuntimeError)) as caught:
            engine.step(rows[0][rank::3], loss_fn=loss)
        assert time.monotonic() - started < 30
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies_is_noticed(when):
    outcomes = run_ranks_to_end(3, die, when, timeout_s=60, group_timeout_s=20)
    assert outcomes[1] == ("died", "ended with exit status 9 and no result")
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "value" and text.startswith("RankError: rank"), text
        assert "lost contact" in text or "failed" in text


def hang() -> str:
    rank = int(os.environ["RANK"])

    class Sleepy(Toy):
        def body(self, x):
            for index, layer in enumerate(self.layers):
                if rank == 1 and index == 1:
                    time.sleep(600)
                x = layer(x)
            return x

    with Engine(Sleepy(), toy_config(timeout_s=5.0)) as engine:
        with pytest.raises(RankError) as caught:
            engine.step(toy_batches(2)[0][rank::2], loss_fn=square_loss)
        return str(caught.value)


def test_a_rank_that_hangs_is_noticed_within_the_timeout():
    outcomes = run_ranks_to_end(2, hang, timeout_s=25, group_timeout_s=10)
    assert outcomes[0][0] == "value" and "lost contact with another rank" in outcomes[0][1]
    assert outcomes[1][0] == "hung" and "in body" in outcomes[1][1]


def other_calls() -> str:
    """Rank 0 trains, rank 1 evaluates: they disagree."""
    from tests.parity.cells import batches
    from tests.tiny import tiny_model

    rank, rows = int(os.environ["RANK"]), batches(2, 1)[0]
    with Engine(tiny_model("llama"), toy_config(timeout_s=6.0)) as engine:
        with pytest.raises(Exception) as caught:
            for _ in range(2):
                engine.step(rows[rank::2]) if rank == 0 else engine.evaluate(rows[rank::2])
        return f"{type(caught.value).__name__}"


def test_ranks_that_make_different_calls_get_an_error_and_do_not_hang():
    assert run_ranks(2, other_calls, timeout_s=60, group_timeout_s=6) == ["RankError", "RankError"]


def full_disk(folder: str) -> str:
    rank = int(os.environ["RANK"])
    settings = toy_config(param_tier="nvme", state_tier="nvme", grad_tier="nvme", nvme_dir=folder)
    with Engine(Toy(), settings) as engine:
        engine.step(toy_batches(2)[0][rank::2], loss_fn=square_loss)
        if rank == 1:

            def full(*_args):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            engine.parts.folder._pwritev = full
        with pytest.raises((OSError, RankError)) as caught:
            engine.step(toy_batches(2)[0][rank::2], loss_fn=square_loss)
        return f"{type(caught.value).__name__}: {caught.value}"


def unreadable_ahead(folder: str) -> str:
    """Rank 1 cannot read the weights of layer 1, which are fetched while layer 0 computes."""
    rank = int(os.environ["RANK"])
    settings = toy_config(param_tier="nvme", state_tier="nvme", grad_tier="nvme", nvme_dir=folder)
    with Engine(Toy(), settings) as engine:
        engine.step(toy_batches(2)[0][rank::2], loss_fn=square_loss)
        engine.drain()
        fetcher, inner = engine.parts.fetcher, engine.parts.fetcher._fetch_group

        def broken(group):
            if rank == 1 and group.name.startswith("layers.1"):
                raise OSError(errno.EIO, "cannot read")
            return inner(group)

        fetcher._fetch_group = broken
        with pytest.raises((OSError, RankError)) as caught:
            engine.step(toy_batches(2)[0][rank::2], loss_fn=square_loss)
        fetcher._fetch_group = inner
        engine.step(toy_batches(2)[0][rank::2], loss_fn=square_loss)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_weights_that_one_rank_cannot_fetch_ahead_stop_all_ranks(tmp_path):
    zero, one = run_ranks(2, unreadable_ahead, str(tmp_path / "tiers"))
    assert zero.startswith("RankError: rank 1 failed (OSError") and one.startswith("OSError") and "cannot read" in one


def bad_batch(failing: int) -> str:
    """A micro-batch that is none: this rank fails before it asks for the first unit, which the others have asked for."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with Engine(Toy(), toy_config()) as engine:
        for number, mbs in enumerate(toy_batches(size, 3)):
            if number == 1:
                bad = [{"input_ids": None}] if rank == failing else mbs[rank::size]
                with pytest.raises((AttributeError, RankError)) as caught:
                    engine.step(bad, loss_fn=square_loss)
            engine.step(mbs[rank::size], loss_fn=square_loss)
        return f"{type(caught.value).__name__} {digest_of(engine)}"


@pytest.mark.parametrize(("size", "failing"), [(2, 0), (3, 2)])
def test_a_rank_that_fails_before_the_others_fetch_leaves_a_clean_engine(size, failing):
    found = [each.split() for each in run_ranks(size, bad_batch, failing)]
    assert [name for name, _ in found] == ["AttributeError" if rank == failing else "RankError" for rank in range(size)]
    assert [digest for _, digest in found] == run_ranks(size, clean_digest)


def clean_digest() -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with Engine(Toy(), toy_config()) as engine:
        for mbs in toy_batches(size, 3):
            engine.step(mbs[rank::size], loss_fn=square_loss)
        return digest_of(engine)


def other_guess() -> str:
    """Rank 1 expects another unit next than rank 0 does."""
    rank = int(os.environ["RANK"])
    with Engine(Toy(), toy_config(timeout_s=6.0)) as engine:
        if rank == 1:
            engine.parts.order.after = lambda unit: engine.parts.units[-1]
        with pytest.raises(RankError) as caught:
            engine.step(toy_batches(2)[0][rank::2], loss_fn=square_loss)
        return str(caught.value)


def test_ranks_that_ask_for_different_units_get_an_error():
    assert all("unshards unit" in text and "all ranks must run the same steps" in text for text in run_ranks(2, other_guess))


def test_one_ranks_full_disk_stops_all(tmp_path):
    zero, one = run_ranks(2, full_disk, str(tmp_path / "tiers"))
    assert zero.startswith("RankError: rank 1 failed")
    assert one.startswith("OSError") and "No space left" in one and str(tmp_path) in one


# the world's own promises


def agreements() -> dict:
    world = World.from_env("cpu")
    rank = world.rank
    found = {
        "ints": world.gather_ints([rank * 100 + i for i in range(70)]),
        "none": world.gather_ints([]),
        "floats": world.gather_floats([0.1 * (rank + 1), float("inf")]),
        "sum": world.sum_over_shards([0.1 * (rank + 1)]),
        "object": world.broadcast_object({"rank": rank}),
    }
    with pytest.raises((ValueError, RankError)) as caught:
        world.agree(ValueError("mine") if rank == 1 else None)
    found["agree"] = f"{type(caught.value).__name__}: {caught.value}"
    world.agree()
    world.barrier()
    return found


def test_agreements():
    found = run_ranks(3, agreements)
    for rank, one in enumerate(found):
        assert one["ints"] == [[r * 100 + i for i in range(70)] for r in range(3)] and one["none"] == [[], [], []]
        assert one["floats"] == [[0.1 * (r + 1), float("inf")] for r in range(3)]
        assert one["sum"] == [sum([0.1, 0.2, 0.1 * 3])] and one["object"] == {"rank": 0}
        assert one["agree"] == (
            "ValueError: mine"
            if rank == 1
            else f"RankError: rank 1 failed (ValueError: mine); this rank ({rank}) stops with it"
        )


def bad_mesh() -> str:
    with pytest.raises(ZftError) as caught:
        Engine(Toy(), toy_config(shard_ranks=2))
    return str(caught.value)


def test_a_mesh_must_divide_the_ranks():
    assert all("engine.shard_ranks=2 does not divide the 3 ranks" in text for text in run_ranks(3, bad_mesh))


def raises() -> None:
    if os.environ["RANK"] == "1":
        raise Broken("here")


def test_the_harness_shows_each_ranks_traceback():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, raises)
    assert list(caught.value.errors) == [1] and "Broken: here" in str(caught.value)


def nan_on_one_rank() -> tuple[str, str]:
    rank = int(os.environ["RANK"])

    def loss(model, mb):
        total, weight = square_loss(model, mb)
        return total * (float("nan") if rank == 1 else 1.0), weight

    with Engine(Toy(), toy_config(max_grad_norm=None, nonfinite="raise")) as engine:
        with pytest.raises((FloatingPointError, RankError)) as caught:
            engine.step(toy_batches(2)[0][rank::2], loss_fn=loss)
        with pytest.raises(RuntimeError) as after:
            engine.step(toy_batches(2)[0][rank::2], loss_fn=square_loss)
        return type(caught.value).__name__, str(after.value)


def test_a_non_finite_gradient_while_updates_run_stops_all_ranks():
    outcomes = run_ranks(2, nan_on_one_rank)
    assert "FloatingPointError" in {name for name, _ in outcomes}
    assert all("resume from the last checkpoint" in text for _, text in outcomes)
