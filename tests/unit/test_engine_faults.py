"""Steps that fail: an exception anywhere, non-finite gradients, a full disk. Afterwards the engine goes on as if they
had not been, or says that it cannot."""

import errno
import math
import os

import pytest
import torch

from tests.parity.cells import batches, digest_of
from tests.tiny import tiny_model
from tests.toy import Toy, same_bits, square_loss, toy_batches, toy_config, weights_of
from zft.api import Engine
from zft.config import ZftError

TIERS = [
    {},
    {"param_tier": "nvme", "state_tier": "nvme", "grad_tier": "nvme"},
    {"param_tier": "cpu", "grad_tier": "nvme"},
]
BACKWARD = {"max_grad_norm": None, "nonfinite": "raise"}


class Broken(Exception):
    pass


class Explode(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Broken("in the backward pass")


class Fragile(Toy):
    """Fails where it is told to: `fuse` is the index of the layer, `late` whether it is in the backward pass."""

    fuse: int | None = None
    late = False

    def body(self, x):
        for index, layer in enumerate(self.layers):
            if index == self.fuse and not self.late:
                raise Broken(f"ahead of layer {index}")
            x = layer(x)
            if index == self.fuse:
                x = Explode.apply(x)
        return x


def run(settings: dict, fail, nvme_dir, steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """(losses, weights, digest of the records); `fail(engine, step)` is called ahead of each step."""
    data, losses = toy_batches(3, steps), []
    with Engine(Fragile(dropout=0.2), toy_config(nvme_dir=str(nvme_dir), **settings)) as engine:
        for number, mbs in enumerate(data):
            fail(engine, number)
            losses.append(engine.step(mbs, loss_fn=square_loss).loss)
        return losses, weights_of(engine), digest_of(engine)


def fail_never(_engine, _number):
    pass


@pytest.mark.parametrize("tiers", TIERS, ids=["device", "nvme", "mixed"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fuse", [0, 2])
@pytest.mark.parametrize("activation", ["none", "full", "selective", "offload"])
def test_a_step_that_raised_leaves_no_trace(tiers, late, fuse, activation, tmp_path):
    def fail(engine, number):
        if number not in (0, 2):
            return
        engine.model.fuse, engine.model.late = fuse, late
        with pytest.raises(Broken):
            engine.step(toy_batches(2, 9)[number + 3], loss_fn=square_loss)
        with pytest.raises(Broken):  # and once more
            engine.step(toy_batches(2, 9)[number + 4], loss_fn=square_loss)
        engine.model.fuse = None

    settings = {"activation": activation, "precision": "bf16", **tiers}
    expected, got = run(settings, fail_never, tmp_path / "a"), run(settings, fail, tmp_path / "b")
    assert got[0] == expected[0] and same_bits(got[1], expected[1]) and got[2] == expected[2]


def test_a_loss_that_raises(tmp_path):
    def fail(engine, number):
        def bad(model, mb):
            model(**mb)
            raise Broken("in the loss")

        with pytest.raises(Broken):
            engine.step(toy_batches(2)[0], loss_fn=bad)

    assert run({"wave": 2}, fail, tmp_path / "a")[2] == run({"wave": 2}, fail_never, tmp_path / "b")[2]


@pytest.mark.parametrize("fuse", [0, 1])
def test_each_unit_is_updated_exactly_once_if_the_forward_pass_raises(fuse, tmp_path):
    """Step 2 raises after the updates of step 1 have run for some units; the others get theirs later."""
    seen: list[str] = []

    def record(lane, name, _start, _end):
        if lane == "update":
            seen.append(name)

    settings = toy_config(param_tier="nvme", state_tier="nvme", grad_tier="nvme", nvme_dir=str(tmp_path / "tiers"))
    with Engine(Fragile(), settings, record=record) as engine:
        engine.step(toy_batches(2)[0], loss_fn=square_loss)
        assert not seen
        engine.model.fuse = fuse
        with pytest.raises(Broken):
            engine.step(toy_batches(2)[0], loss_fn=square_loss)
        early = list(seen)
        assert len(set(early)) == len(early) and len(early) < len(engine.parts.records)
        engine.drain()
        assert sorted(seen) == sorted(record.group.name for record in engine.parts.records.values())
        after = weights_of(engine)
        engine.drain()
        assert len(seen) == len(engine.parts.records) and same_bits(weights_of(engine), after)
    with Engine(Fragile(), toy_config()) as engine:
        engine.step(toy_batches(2)[0], loss_fn=square_loss)
        assert same_bits(weights_of(engine), after)


def test_a_failure_while_updates_run_in_the_backward_pass_stops_the_engine():
    """Some units have stepped, others not: there is no way back but the last checkpoint."""
    with Engine(Fragile(), toy_config(**BACKWARD)) as engine:
        engine.step(toy_batches(2)[0], loss_fn=square_loss)
        engine.model.fuse, engine.model.late = 0, True
        with pytest.raises(Broken):
            engine.step(toy_batches(2)[0], loss_fn=square_loss)
        engine.model.fuse = None
        for call in (lambda: engine.step(toy_batches(2)[0], loss_fn=square_loss), lambda: weights_of(engine)):
            with pytest.raises(RuntimeError, match="resume from the last checkpoint"):
                call()


# non-finite gradients


def poisoned(value: float):
    def loss(model, mb):
        total, weight = square_loss(model, mb)
        return total * value, weight

    return loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tiers", TIERS, ids=["device", "nvme", "mixed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_non_finite_step_changes_nothing_and_is_counted(value, tiers, precision, tmp_path):
    def engine_with(folder) -> Engine:
        return Engine(Toy(), toy_config(precision=precision, nvme_dir=str(folder), **tiers))

    data = toy_batches(2, 3)
    with engine_with(tmp_path / "a") as engine:
        engine.step(data[0], loss_fn=square_loss)
        engine.drain()
        before = digest_of(engine)
        engine.step(data[1], loss_fn=square_loss)
        engine.drain()
        expected = digest_of(engine)
    with engine_with(tmp_path / "b") as engine:
        engine.step(data[0], loss_fn=square_loss)
        result = engine.step(data[2], loss_fn=poisoned(value))
        assert result.skipped and not math.isfinite(result.grad_norm)
        assert engine.step_count == 1 and engine.stepper.skipped_count == 1
        engine.drain()
        assert digest_of(engine) == before
        good = engine.step(data[1], loss_fn=square_loss)
        assert not good.skipped and engine.step_count == 2
        engine.drain()
        if precision != "fp16":  # fp16: the scale has another hysteresis, the bits are the same all the same
            assert engine.stepper.skipped_count == 1
        assert digest_of(engine) == expected


def test_a_skipped_step_without_clipping(tmp_path):
    settings = toy_config(max_grad_norm=None)
    with Engine(Toy(), settings) as engine:
        start = weights_of(engine)
        assert engine.step(toy_batches(2)[0], loss_fn=poisoned(math.nan)).skipped
        assert same_bits(weights_of(engine), start) and engine.step_count == 0


def test_nonfinite_raise_with_clipping_leaves_the_weights_and_goes_on():
    with Engine(Toy(), toy_config(nonfinite="raise")) as engine:
        start = weights_of(engine)
        with pytest.raises(FloatingPointError, match="weights are untouched"):
            engine.step(toy_batches(2)[0], loss_fn=poisoned(math.inf))
        assert same_bits(weights_of(engine), start)
        assert not engine.step(toy_batches(2)[0], loss_fn=square_loss).skipped


def test_nonfinite_raise_in_the_backward_pass_names_the_unit():
    with Engine(Toy(), toy_config(**BACKWARD)) as engine:
        with pytest.raises(FloatingPointError, match="gradient of .* is not finite at step 1"):
            engine.step(toy_batches(2)[0], loss_fn=poisoned(math.nan))
        with pytest.raises(RuntimeError, match="resume from the last checkpoint"):
            engine.step(toy_batches(2)[0], loss_fn=square_loss)


def test_fp16_overflows_use_up_hysteresis_and_then_halve_the_scale():
    with Engine(Toy(), toy_config(precision="fp16")) as engine:
        scales = []
        for value in (math.inf, math.inf, math.inf, 1.0):
            engine.step(toy_batches(1)[0], loss_fn=poisoned(value))
            scales.append(engine.parts.loss_scale)
        assert scales == [2.0**16, 2.0**15, 2.0**14, 2.0**14]
        assert engine.step_count == 1 and engine.stepper.skipped_count == 3


def test_fp16_at_the_floor_raises():
    with Engine(Toy(), toy_config(precision="fp16")) as engine:
        engine.parts.scaler.scale, engine.parts.scaler._left = 1.0, 1
        with pytest.raises(FloatingPointError, match="lowest loss scale"):
            engine.step(toy_batches(1)[0], loss_fn=poisoned(math.inf))


# labels and batches


def masked(mb: dict) -> dict:
    return {**mb, "labels": torch.full_like(mb["labels"], -100)}


def test_a_masked_micro_batch_adds_exactly_nothing():
    data = batches(3, 1)[0]
    with Engine(tiny_model("llama"), toy_config()) as engine:
        expected = engine.step(data), weights_of(engine)
    with Engine(tiny_model("llama"), toy_config()) as engine:
        got = engine.step([data[0], masked(data[1]), *data[1:]]), weights_of(engine)
    assert (got[0].loss, got[0].tokens, got[0].grad_norm) == (
        expected[0].loss,
        expected[0].tokens,
        expected[0].grad_norm,
    )
    assert same_bits(got[1], expected[1])


def test_nothing_supervised_is_an_error_before_any_weight_is_touched():
    data = batches(2, 1)[0]
    with Engine(tiny_model("llama"), toy_config()) as engine:
        start = weights_of(engine)
        with pytest.raises(ZftError, match="no token of this step is supervised"):
            engine.step([masked(mb) for mb in data])
        with pytest.raises(ZftError, match="no micro-batches"):
            engine.step([])
        assert same_bits(weights_of(engine), start) and engine.step(data).tokens > 0


def test_a_label_outside_of_the_vocabulary_is_an_error_and_leaves_no_trace():
    data = batches(2, 2)
    bad = [{**mb, "labels": torch.where(mb["labels"] == -100, -100, 64)} for mb in data[0]]
    with Engine(tiny_model("llama"), toy_config()) as engine:
        with pytest.raises(ZftError, match="label 64 is outside the model's vocabulary of 64"):
            engine.step(bad)
        losses = [engine.step(mbs).loss for mbs in data]
    with Engine(tiny_model("llama"), toy_config()) as engine:
        assert [engine.step(mbs).loss for mbs in data] == losses


@pytest.mark.parametrize(("weight", "message"), [(0.0, "weight 0 for every micro-batch")])
def test_a_loss_without_weight_is_an_error(weight, message):
    with Engine(Toy(), toy_config()) as engine:
        with pytest.raises(ZftError, match=message):
            engine.step(toy_batches(2)[0], loss_fn=lambda model, mb: (model(**mb).sum(), weight))
        assert not engine.step(toy_batches(2)[0], loss_fn=square_loss).skipped


# the disk


class FullDisk:
    """os.pwritev until `left` writes are done."""

    def __init__(self):
        self.left = None

    def __call__(self, fd, buffers, offset):
        if self.left is not None:
            if self.left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= 1
        return os.pwritev(fd, buffers, offset)


def engine_on_disk(tmp_path) -> tuple[Engine, FullDisk]:
    settings = toy_config(param_tier="nvme", state_tier="nvme", grad_tier="nvme", nvme_dir=str(tmp_path / "tiers"))
    engine, disk = Engine(Toy(), settings), FullDisk()
    engine.parts.folder._pwritev = disk
    return engine, disk


def test_a_disk_that_is_full_when_a_gradient_is_written(tmp_path):
    """The updates have run, the step's gradients are lost: the next step is clean."""
    engine, disk = engine_on_disk(tmp_path)
    with engine:
        engine.step(toy_batches(2)[0], loss_fn=square_loss)
        engine.drain()
        before, disk.left = digest_of(engine), 1
        with pytest.raises(OSError, match="nvme write .* failed") as caught:
            engine.step(toy_batches(2)[0], loss_fn=square_loss)
        assert caught.value.errno == errno.ENOSPC and str(tmp_path) in caught.value.filename
        disk.left = None
        assert digest_of(engine) == before
        assert not engine.step(toy_batches(2)[0], loss_fn=square_loss).skipped


def test_a_disk_that_is_full_in_an_update_stops_the_engine(tmp_path):
    engine, disk = engine_on_disk(tmp_path)
    with engine:
        engine.step(toy_batches(2)[0], loss_fn=square_loss)
        disk.left = 2
        with pytest.raises(OSError, match="nvme write"):
            engine.step(toy_batches(2)[0], loss_fn=square_loss)
        disk.left = None
        for call in (lambda: engine.step(toy_batches(2)[0], loss_fn=square_loss), lambda: weights_of(engine)):
            with pytest.raises(
                RuntimeError, match="stopped in the middle of an update .*resume from the last checkpoint"
            ):
                call()


def test_a_short_read_names_the_file(tmp_path):
    engine, _ = engine_on_disk(tmp_path)
    with engine:
        engine.step(toy_batches(2)[0], loss_fn=square_loss)
        engine.parts.folder._preadv = lambda fd, buffers, offset: 0
        with pytest.raises(OSError, match="nvme read at offset .* moved 0 of") as caught:
            engine.step(toy_batches(2)[0], loss_fn=square_loss)
        assert str(tmp_path) in caught.value.filename
