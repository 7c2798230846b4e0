"""The compact record: how near to exact AdamW it stays, and that neither moments nor small steps get stuck."""

import pytest
import torch

from zft.config import AdamW, EngineConfig
from zft.optim import Hyper, Segments, make_rule
from zft.optim import torch_update as device_path
from zft.precision import resolve_precision


def rules(**options):
    for compact in (False, True):
        optim = AdamW(compact=compact, **options)
        yield make_rule(optim, resolve_precision(EngineConfig(precision="bf16", optim=optim), "cpu"))


def fresh(rule, weights):
    views = {f.name: torch.empty(f.entries(weights.numel()), dtype=f.dtype) for f in rule.fields}
    rule.init(views, weights)
    return views


def moments(views):
    return (
        device_path.decode8(views["m"], views["m_scale"], 127.0),
        device_path.decode8(views["v"], views["v_scale"], 255.0),
    )


def test_five_bytes_and_a_bit():
    _, compact = rules()
    assert sum(f.bytes(256 * 100) for f in compact.fields) == 100 * (5 * 256 + 8)


@pytest.mark.parametrize("numel", [1, 3, 255, 256, 257, 4095, 65537])
def test_close_to_exact_after_a_run(numel):
    """The distance to exact AdamW stays small beside the one travelled, though a block's gradients span 2 decades."""
    exact, compact = rules(betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(numel)
    start = torch.randn(numel, generator=generator) * 0.02
    a, b = fresh(exact, start), fresh(compact, start)
    sizes = 10 ** (torch.rand(numel, generator=generator) * 2 - 2)
    pull = torch.randn(numel, generator=generator)
    for step in range(1, 101):
        grad = (torch.randn(numel, generator=generator) + pull) * sizes
        for rule, views in ((exact, a), (compact, b)):
            rule.update(views, grad, Segments.whole(numel), Hyper(step, 1e-4))
    travelled = (exact.master(a) - start).norm()
    apart = (exact.master(a) - compact.master(b)).norm()
    assert apart < 0.1 * travelled, f"{apart / travelled:.3f}"


def test_second_moment_follows_slow_changes():
    """beta2 = 0.999 changes v by 0.1 % a step, far less than a quantization step: rounded to nearest it would stand."""
    _, compact = rules(betas=(0.9, 0.999))
    views = fresh(compact, torch.zeros(8192))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 1501):
        grad = torch.randn(8192, generator=generator) * (1.0 if step <= 500 else 0.1)
        grad[::256] = 1.0  # the blocks' scales stay
        compact.update(views, grad, Segments.whole(8192), Hyper(step, 0.0))
    expected = (1 - 0.999**500) * 0.999**1000 + 0.01 * (1 - 0.999**1000)
    assert moments(views)[1].view(-1, 256)[:, 1:].mean().item() == pytest.approx(expected, rel=0.02)


def test_small_steps_move_the_weight_on_average():
    """Steps of a twentieth of the residual's resolution, 2000 times."""
    _, compact = rules()
    start = 0.05 + torch.rand(65536, generator=torch.Generator().manual_seed(0)) * 0.01
    views = fresh(compact, start)
    first = compact.master(views)
    resolution = 2.0**-5 * 2.0**-15  # 16 bits of significand at 0.05
    lr, steps = resolution / 20, 400
    for step in range(1, steps + 1):
        compact.update(views, torch.ones(65536), Segments.whole(65536), Hyper(step, lr))
    moved = (first - compact.master(views)).mean().item()
    assert moved == pytest.approx(lr * steps, rel=0.05)


def test_nothing_drifts_without_a_gradient():
    _, compact = rules()
    views = fresh(compact, torch.randn(1000))
    before = {name: view.clone() for name, view in views.items()}
    for step in range(1, 20):
        compact.update(views, torch.zeros(1000), Segments.whole(1000), Hyper(step, 1e-2))
    for name in ("hi", "lo", "m", "v"):
        assert torch.equal(views[name], before[name]), name


def test_a_non_zero_second_moment_never_becomes_zero():
    """A tiny gradient beside a huge one: v = 0 with m > 0 would make the step m / eps."""
    _, compact = rules()
    views = fresh(compact, torch.zeros(256))
    grad = torch.full((256,), 1e-9)
    grad[0] = 1e3
    for step in range(1, 50):
        compact.update(views, grad, Segments.whole(256), Hyper(step, 1e-3))
        assert (views["v"] > 0).all()
    assert compact.master(views).abs().max() < 1e-3 * 60


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-20, 1.0, 1e18])
def test_extreme_gradients_stay_finite(magnitude):
    _, compact = rules()
    views = fresh(compact, torch.ones(512))
    for step in range(1, 6):
        compact.update(views, torch.randn(512) * magnitude, Segments.whole(512), Hyper(step, 1e-3))
    assert compact.master(views).isfinite().all() and all(x.isfinite().all() for x in moments(views))


@pytest.mark.parametrize("levels", [127.0, 255.0])
def test_codes_survive_decoding_and_encoding(levels):
    codes = torch.arange(-127 if levels == 127 else 0, levels + 1)
    codes = torch.cat([codes, torch.full((-codes.numel() % 256,), levels)])
    scales = torch.tensor([3.7] * (codes.numel() // 256))
    values = device_path.decode8(codes, scales, levels)
    back, scales_back = device_path.encode8(values, levels, 0.0, 1)
    torch.testing.assert_close(scales_back, scales)
    assert ((back - codes).abs() <= 1).all() and (back != codes).float().mean() < 0.5
    assert (values.diff()[: int(levels)] > 0).all()


def test_rounding_by_value_is_right_on_average():
    values = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)) * 0.3 + 0.1
    values.view(-1, 256)[:, 0] = 1.0
    codes, scales = device_path.encode8(values, 255.0, 1.0, 1)
    error = device_path.decode8(codes, scales, 255.0) - values
    assert error.abs().max() < 0.01 and abs(error.mean().item()) < 2e-5
    hi, lo = device_path.split8(values, 1)
    assert abs((device_path.join8(hi, lo) - values).mean().item()) < 2e-8


def test_the_path_for_gpus_computes_the_same(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: torch.from_numpy(t.numpy() ** 0.5))
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda t: t.copy_(torch.from_numpy(t.numpy() ** 0.5)))
    _, rule = rules(weight_decay=0.1)
    weights = torch.randn(5001)
    ours, theirs = fresh(rule, weights), fresh(rule, weights)
    segments = Segments.of([(0, 2000, 1.0), (2048, 5001, 0.0)])
    for step in range(1, 6):
        grad, hyper = torch.randn(5001), Hyper(step, 1e-3, 0.7)
        rule.update(ours, grad, segments, hyper)
        with monkeypatch.context() as patch:
            patch.setattr(rule, "_update_cpu", rule._update_torch, raising=False)
            rule.update(theirs, grad, segments, hyper)
    for name, view in ours.items():
        assert torch.equal(view, theirs[name]), name


def test_segments_must_start_at_blocks():
    _, rule = rules()
    with pytest.raises(AssertionError, match="block boundaries"):
        rule.update(fresh(rule, torch.ones(512)), torch.ones(512), Segments.of([(100, 512, 1.0)]), Hyper(1, 1e-3))
