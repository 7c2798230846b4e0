"""Models with unusual habits equal the plain loop: shared and skipped layers, unused and frozen parameters, dropout."""

import pytest
import torch
from torch import nn

from tests.plain import plain_loop
from tests.toy import ADAMW, WIDTH, Layer, Toy, apart, same_bits, square_loss, toy_batches, toy_config, weights_of
from zft.api import Engine

ACTIVATIONS = ["none", "full", "selective", "offload"]


def assert_equals_plain(kind: type[Toy], batches: list[list[dict]], **settings) -> dict[str, torch.Tensor]:
    config = toy_config(**settings)
    plain = plain_loop(kind(), batches, ADAMW, "fp32", config.max_grad_norm, square_loss)
    with Engine(kind(), config) as engine:
        results = [engine.step(mbs, loss_fn=square_loss) for mbs in batches]
        weights = weights_of(engine)
    assert [r.loss for r in results] == pytest.approx(plain.losses, abs=1e-6, rel=1e-6)
    assert [r.grad_norm for r in results] == pytest.approx(plain.norms, abs=1e-6, rel=1e-6)
    assert apart(weights, plain.weights) <= 1e-6
    return weights


class Shared(Toy):
    """The same layer twice, with another between."""

    def body(self, x):
        x = self.layers[0](x)
        x = self.layers[1](x)
        return self.layers[2](self.layers[0](x))


class Skipping(Toy):
    """Layer 1 runs only in micro-batches that say so."""

    def body(self, x, deep):
        for index, layer in enumerate(self.layers):
            if index != 1 or deep:
                x = layer(x)
        return x


class Backwards(Toy):
    """Layers in another order than that of the modules."""

    def body(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class InPlace(Toy):
    """Changes hidden states in place, after a layer has returned them and before another sees them."""

    def body(self, x):
        for layer in self.layers:
            x = layer(x)
            x.mul_(1.5).add_(0.1)
        return x


class Glue(Toy):
    """Per-layer inputs computed once, outside of the units, from parameters of no unit."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def body(self, x):
        common = torch.tanh(self.shift * x)
        for index, layer in enumerate(self.layers):
            x = layer(x + common * (index + 1)) + common.square()
        return x


class Odd(Toy):
    """An empty parameter, a single element, a parameter that nothing uses, a scalar."""

    def __init__(self):
        super().__init__()
        self.layers[0].register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        self.layers[0].register_parameter("unused", nn.Parameter(torch.ones(5, 5)))
        self.layers[1].register_parameter("one", nn.Parameter(torch.ones(1)))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def body(self, x):
        for layer in self.layers:
            x = layer(x) * self.scalar
        return x + self.layers_one()

    def layers_one(self):
        return 0.0


class Autocast(Toy):
    """The model itself chooses a context for some of its layers."""

    def body(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[0](x)
        x = self.layers[1](x.float())
        with torch.autocast("cpu", enabled=False):
            return self.layers[2](x)


class PassingOn(Toy):
    """A unit that hands its input on, unchanged, beside its output; the model then changes what it got in place."""

    keeps_graph = True

    def __init__(self):
        super().__init__()
        self.layers[1].forward = lambda x: (x, Layer.forward(self.layers[1], x), x.view_as(x))

    def body(self, x):
        x = self.layers[0](x)
        same, y, view = self.layers[1](x)
        if not self.keeps_graph:  # autograd itself refuses this where it saved the input
            view.mul_(3.0)
            same.add_(1.0).div_(3.0)
            view = view / 3.0
            same = same * 3.0 - 1.0
        return self.layers[2](y * same.square() + view)


class Identity(Toy):
    """A unit that does nothing, and in-place work on what it returned."""

    def __init__(self):
        super().__init__()
        self.layers[1].forward = lambda x: x

    def body(self, x):
        x = self.layers[0](x)
        x = self.layers[1](x)
        x.mul_(2.0)
        return self.layers[2](x)


class NoGradFirst(Toy):
    """A look ahead without gradients, through the same units."""

    def body(self, x):
        with torch.no_grad():
            ahead = self.layers[1](self.layers[0](x))
        for layer in self.layers:
            x = layer(x)
        return x * ahead.mean()


class Noisy(Toy):
    def __init__(self):
        super().__init__(dropout=0.3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", [Shared, Backwards, InPlace, Glue, Odd, PassingOn, Identity, NoGradFirst])
@pytest.mark.parametrize("wave", [None, 1])
def test_equals_the_plain_loop(kind, activation, wave):
    assert_equals_plain(kind, toy_batches(3, steps=3), activation=activation, wave=wave)


@pytest.mark.parametrize("activation", ["full", "selective", "offload"])
def test_an_input_that_a_unit_hands_on_may_be_changed_in_place(activation, monkeypatch):
    """The recompute still sees what the unit saw."""
    data = toy_batches(3, steps=2)
    plain = plain_loop(PassingOn(), data, ADAMW, "fp32", 1.0, square_loss)
    monkeypatch.setattr(PassingOn, "keeps_graph", False)
    with Engine(PassingOn(), toy_config(activation=activation)) as engine:
        losses = [engine.step(mbs, loss_fn=square_loss).loss for mbs in data]
        assert losses == pytest.approx(plain.losses, rel=1e-5) and apart(weights_of(engine), plain.weights) <= 1e-5


def test_a_context_that_the_model_chose_holds_in_the_recompute():
    data, found = toy_batches(3, steps=3), []
    plain = plain_loop(Autocast(), data, ADAMW, "fp32", 1.0, square_loss)
    for activation in ACTIVATIONS:
        with Engine(Autocast(), toy_config(activation=activation)) as engine:
            losses = [engine.step(mbs, loss_fn=square_loss).loss for mbs in data]
            found.append((losses, weights_of(engine)))
            assert losses == pytest.approx(plain.losses, abs=1e-3)  # its gradients are divided ahead of the rounding
    for losses, weights in found[1:]:
        assert losses == found[0][0] and same_bits(weights, found[0][1])
    assert found[0][0][0] == pytest.approx(plain.losses[0], abs=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layers_skipped_by_data(activation):
    batches = toy_batches(3, steps=4)
    for number, mbs in enumerate(batches):
        for index, mb in enumerate(mbs):
            mb["deep"] = torch.tensor(bool((number + index) % 2) and number != 2)
    assert_equals_plain(Skipping, batches, activation=activation)
    assert_equals_plain(Skipping, batches, activation=activation, wave=1)
    assert_equals_plain(Skipping, batches, activation=activation, wave=2, max_grad_norm=None, nonfinite="raise")


@pytest.mark.parametrize("update", [{}, {"max_grad_norm": None, "nonfinite": "raise"}])
def test_an_unused_parameter_keeps_its_value(update):
    """No gradient: no decay, no momentum, as in torch.optim."""
    weights = assert_equals_plain(Odd, toy_batches(2, steps=3), **update)
    assert torch.equal(weights["layers.0.unused"], torch.ones(5, 5))
    assert torch.equal(weights["layers.1.one"], torch.ones(1))
    assert weights["layers.0.empty"].shape == (0, 3)


def test_a_layer_that_is_skipped_for_a_while_goes_on_where_it_was():
    """Momentum does not move it while it is unused, and its moments are kept."""
    batches = toy_batches(2, steps=6)
    for number, mbs in enumerate(batches):
        for mb in mbs:
            mb["deep"] = torch.tensor(number not in (2, 3))
    assert_equals_plain(Skipping, batches)


def test_a_resumed_engine_knows_which_layers_were_skipped(tmp_path):
    batches = toy_batches(2, steps=6)
    for number, mbs in enumerate(batches):
        for mb in mbs:
            mb["deep"] = torch.tensor(number not in (2, 3))
    with Engine(Skipping(), toy_config()) as engine:
        for mbs in batches[:4]:
            engine.step(mbs, loss_fn=square_loss)
        engine.save(tmp_path / "step-4")
        for mbs in batches[4:]:
            engine.step(mbs, loss_fn=square_loss)
        expected = weights_of(engine)
    with Engine(Skipping(), toy_config()) as engine:
        engine.load(tmp_path / "step-4")
        for mbs in batches[4:]:
            engine.step(mbs, loss_fn=square_loss)
        assert same_bits(weights_of(engine), expected)


def test_a_frozen_layer_keeps_its_bits_and_has_no_state():
    def frozen() -> Toy:
        model = Toy()
        model.layers[1].requires_grad_(False)
        model.embed.requires_grad_(False)
        return model

    start = {name: p.detach().clone() for name, p in frozen().named_parameters()}
    batches = toy_batches(2, steps=3)
    plain = plain_loop(frozen(), batches, ADAMW, "fp32", 1.0, square_loss)
    with Engine(frozen(), toy_config()) as engine:
        losses = [engine.step(mbs, loss_fn=square_loss).loss for mbs in batches]
        weights = weights_of(engine)
        fields = {r.group.name: sorted(r.slabs) for r in engine.parts.records.values() if not r.group.trainable}
    assert losses == pytest.approx(plain.losses, abs=1e-6, rel=1e-6)
    kept = [name for name in start if name.startswith(("layers.1.", "embed."))]
    assert kept and all(torch.equal(weights[name], start[name]) for name in kept)
    assert fields and set(map(tuple, fields.values())) == {("hi",)}
    assert apart({n: weights[n] for n in plain.weights}, plain.weights) <= 1e-6


def test_everything_frozen_is_an_error_or_a_step_without_change():
    model = Toy().requires_grad_(False)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Engine(model, toy_config()) as engine:
        result = engine.step(toy_batches(1)[0], loss_fn=square_loss)
        assert result.grad_norm == 0.0 and same_bits(weights_of(engine), start)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_does_not_depend_on_waves_or_on_what_is_kept(precision):
    batches = toy_batches(4, steps=3)
    settings = [{"activation": a, "wave": w} for a in ACTIVATIONS for w in (None, 1, 3)]
    losses = []
    for setting in settings:
        with Engine(Noisy(), toy_config(precision=precision, **setting)) as engine:
            losses.append([engine.step(mbs, loss_fn=square_loss).loss for mbs in batches])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-6 if precision == "fp32" else 1e-3)
    with Engine(Noisy(), toy_config(seed=1)) as engine:
        assert engine.step(batches[0], loss_fn=square_loss).loss != pytest.approx(losses[0][0], abs=1e-4)


def test_dropout_is_fresh_in_each_step_and_micro_batch():
    ids = toy_batches(1)[0][0]
    with Engine(Noisy(), toy_config(optim=type(ADAMW)(lr=0.0))) as engine:
        losses = {engine.step([ids], loss_fn=square_loss).loss for _ in range(4)}
        assert len(losses) == 4
        one, two = engine.step([ids, ids], loss_fn=square_loss).loss, engine.step([ids], loss_fn=square_loss).loss
        assert one != two


def test_a_step_leaves_the_callers_random_stream_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with Engine(Noisy(), toy_config()) as engine:
        torch.manual_seed(7)
        engine.step(toy_batches(2)[0], loss_fn=square_loss)
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("activation", ["full", "selective", "offload"])
def test_a_changed_input_of_a_unit_is_an_error(activation):
    class Vandal(Toy):
        def body(self, x):
            x = self.layers[0](x)
            y = self.layers[1](x)
            x.add_(1.0)  # layer 1 would be computed again from another input
            return self.layers[2](x + y)

    with Engine(Vandal(), toy_config(activation=activation)) as engine:
        start = weights_of(engine)
        with pytest.raises(RuntimeError, match="changed in place"):
            engine.step(toy_batches(1)[0], loss_fn=square_loss)
        assert same_bits(weights_of(engine), start)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_loss_that_runs_the_model_twice(activation):
    """As a preference loss does."""

    def loss(model, mb):
        first, second = model(**mb), model(mb["input_ids"].flip(-1))
        return (first - second.detach() * 0.5).square().sum() + (first * second).sum(), float(first.numel())

    data = toy_batches(2, steps=3)
    plain = plain_loop(Toy(), data, ADAMW, "fp32", 1.0, loss)
    with Engine(Toy(), toy_config(activation=activation)) as engine:
        assert [engine.step(mbs, loss_fn=loss).loss for mbs in data] == pytest.approx(plain.losses, abs=1e-6, rel=1e-6)
        assert apart(weights_of(engine), plain.weights) <= 1e-6


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_cannot_be_read_outside_of_their_unit(activation):
    class Peeking(Toy):
        def body(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.layers[0].inner.weight.sum()

    with Engine(Peeking(), toy_config(activation=activation)) as engine:
        weight = engine.model.layers[0].inner.weight
        assert weight.is_meta and weight.shape == (WIDTH, WIDTH) and weight.dtype == torch.float32
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            weight.sum().item()
        with pytest.raises(RuntimeError, match="meta"):
            engine.step(toy_batches(1)[0], loss_fn=square_loss)


def test_a_unit_called_outside_of_a_step_says_so():
    with Engine(Toy(), toy_config()) as engine:
        with pytest.raises(RuntimeError, match="outside of an engine step"):
            engine.model(**toy_batches(1)[0][0])


def test_the_model_is_usable_again_after_close():
    model = Toy()
    engine = Engine(model, toy_config())
    engine.close()
    assert "forward" not in model.layers[0].__dict__ and type(model.layers[0]) is Layer


def test_train_and_eval_mode_switch():
    """Evaluation runs without dropout, changes nothing, and training goes on as if it had not happened."""
    from tests.parity.cells import batches
    from tests.tiny import tiny_model

    data = batches(2, 3)
    settings = toy_config(precision="bf16")
    with Engine(tiny_model("gpt2"), settings) as engine:
        expected = [engine.step(mbs).loss for mbs in data]
    with Engine(tiny_model("gpt2"), settings) as engine:
        losses = [engine.step(data[0]).loss]
        was = engine.evaluate(data[0]), engine.evaluate(data[0])
        assert was[0] == was[1] and was[0].tokens > 0
        engine.model.eval()  # a step trains whatever the caller left
        losses += [engine.step(mbs).loss for mbs in data[1:]]
    assert losses == expected
