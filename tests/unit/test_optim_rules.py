"""Every rule on every record against float64 arithmetic and torch.optim; what a step must leave alone."""

import math
import subprocess
import sys

import pytest
import torch

from zft.config import SGD, AdamW, EngineConfig, Lion
from zft.optim import Hyper, Segments, make_rule
from zft.optim import torch_update as device_path
from zft.precision import resolve_precision, split_master

SIZES = [0, 1, 3, 4095, 65537]
RULES = [AdamW(eps=1e-3, weight_decay=0.1), SGD(weight_decay=0.1), Lion(weight_decay=0.1)]
PRECISIONS = ["bf16", "fp16", "fp32"]


def rule_for(optim, precision):
    return make_rule(optim, resolve_precision(EngineConfig(precision=precision, optim=optim), "cpu"))


def views_of(rule, numel):
    return {f.name: torch.empty(f.entries(numel), dtype=f.dtype) for f in rule.fields}


def fresh(rule, weights):
    views = views_of(rule, weights.numel())
    rule.init(views, weights)
    return views


def grads(numel, steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(steps)]


def float64_reference(optim, weights, gradients, lr):
    """The papers' formulas, one line each, in float64."""
    p, m, v = weights.double(), 0.0, 0.0
    for t, grad in enumerate(gradients, 1):
        g = grad.double()
        if isinstance(optim, AdamW):
            (b1, b2), p = optim.betas, p * (1 - lr * optim.weight_decay)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            p = p - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + optim.eps)
        elif isinstance(optim, SGD):
            m = optim.momentum * m + g + optim.weight_decay * p
            p = p - lr * m
        else:
            b1, b2 = optim.betas
            p = p * (1 - lr * optim.weight_decay) - lr * (b1 * m + (1 - b1) * g).sign()
            m = b2 * m + (1 - b2) * g
    return p


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optim", RULES, ids=lambda o: type(o).__name__)
def test_ten_steps_equal_the_formulas(optim, precision, grad_dtype, numel):
    rule = rule_for(optim, precision)
    # below 1 in size, so that ten float32 roundings stay below 1e-6
    weights = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 0.1
    views, gradients = fresh(rule, weights), grads(numel, 10, grad_dtype)
    for step, grad in enumerate(gradients, 1):
        # stored scaled by 4, as a loss scale would; exact in both dtypes
        rule.update(views, grad * 4, Segments.whole(numel), Hyper(step, 1e-3, 0.25))
    expected = float64_reference(optim, weights, gradients, 1e-3)
    torch.testing.assert_close(rule.master(views).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_adamw_equals_torch_with_and_without_decay(precision):
    optim = AdamW(eps=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rule, numel, cut = rule_for(optim, precision), 10_007, 4000
    weights = torch.randn(numel)
    views = fresh(rule, weights)
    decayed, plain = weights[:cut].clone().requires_grad_(), weights[cut:].clone().requires_grad_()
    theirs = torch.optim.AdamW(
        [{"params": [decayed]}, {"params": [plain], "weight_decay": 0.0}],
        lr=1e-3,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=0.1,
    )
    segments = Segments.of([(0, cut, 1.0), (cut, numel, 0.0)])
    for step, grad in enumerate(grads(numel, 20), 1):
        decayed.grad, plain.grad = grad[:cut], grad[cut:]
        theirs.step()
        rule.update(views, grad, segments, Hyper(step, 1e-3))
    torch.testing.assert_close(rule.master(views), torch.cat([decayed, plain]).detach(), rtol=0, atol=1e-6)


def test_sgd_equals_torch():
    optim = SGD(momentum=0.9, weight_decay=0.1)
    rule, weights = rule_for(optim, "fp32"), torch.randn(4099)
    views, parameter = fresh(rule, weights), weights.clone().requires_grad_()
    theirs = torch.optim.SGD([parameter], lr=1e-2, momentum=0.9, weight_decay=0.1)
    for step, grad in enumerate(grads(4099, 20), 1):
        parameter.grad = grad
        theirs.step()
        rule.update(views, grad, Segments.whole(4099), Hyper(step, 1e-2))
    torch.testing.assert_close(views["hi"], parameter.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optim", RULES, ids=lambda o: type(o).__name__)
def test_hi_is_the_rounded_master_after_every_step(optim, precision):
    rule, numel = rule_for(optim, precision), 3001
    views = fresh(rule, torch.randn(numel))
    for step, grad in enumerate(grads(numel, 3), 1):
        rule.update(views, grad, Segments.whole(numel), Hyper(step, 1e-3))
        master = rule.master(views)
        expected = split_master(master)[0] if precision == "bf16" else master.to(views["hi"].dtype)
        assert torch.equal(views["hi"], expected)


def test_small_steps_are_not_lost():
    """Reported against other tools: weight 1.0, 100 steps of -6e-4. Half the gap below 1.0 in bfloat16 is 0.00195."""
    rule = rule_for(SGD(momentum=0.0), "bf16")
    views = fresh(rule, torch.ones(1))
    for step in range(1, 101):
        rule.update(views, torch.full((1,), 6e-4), Segments.whole(1), Hyper(step, 1.0))
    plain = torch.ones(1)
    for _ in range(100):
        plain -= 6e-4
    assert rule.master(views).item() == plain.item() == pytest.approx(0.94, abs=5e-6)
    assert views["hi"].item() == 0.94140625
    bare = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100):
        bare.sub_(6e-4)
    assert bare.item() == 1.0, "without a master nothing moves"


@pytest.mark.parametrize("optim", [*RULES, AdamW(compact=True, weight_decay=0.1)], ids="adamw sgd lion 8bit".split())
def test_elements_outside_segments_keep_every_bit(optim):
    rule = rule_for(optim, "bf16")
    views = fresh(rule, torch.randn(2048))
    rule.update(views, torch.randn(2048), Segments.whole(2048), Hyper(1, 1e-2))
    before = {name: view.clone() for name, view in views.items()}
    rule.update(views, torch.randn(2048), Segments.of([(256, 512, 1.0), (1024, 1031, 1.0)]), Hyper(2, 1e-2))
    for name, view in views.items():
        block = 2048 // view.numel()
        changed = (view != before[name]).nonzero().flatten() * block
        inside = ((changed >= 256) & (changed < 512)) | ((changed >= 1024) & (changed < 1031))
        assert inside.all() and changed.numel(), name
    untouched = {name: view.clone() for name, view in views.items()}
    rule.update(views, torch.randn(2048), Segments.of([]), Hyper(3, 1e-2))
    assert all(torch.equal(view, untouched[name]) for name, view in views.items())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_init_is_exact(precision, dtype):
    rule, weights = rule_for(AdamW(), precision), (torch.randn(999) * 0.02).to(dtype)
    views = fresh(rule, weights)
    assert torch.equal(rule.master(views), weights.float())
    assert not views["m"].any() and not views["v"].any()
    if precision == "bf16" and dtype == torch.bfloat16:
        assert torch.equal(views["hi"], weights) and not views["lo"].any()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optim", RULES, ids=lambda o: type(o).__name__)
def test_the_path_for_gpus_computes_the_same(optim, precision, numel, monkeypatch):
    """Bit for bit: the same operations in the same order. (torch's vectorised square root on the CPU may be one unit
    in the last place off the exact one, so numpy's stands in for it.)"""
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: torch.from_numpy(t.numpy() ** 0.5))
    rule = rule_for(optim, precision)
    weights = torch.randn(numel)
    ours, theirs = fresh(rule, weights), fresh(rule, weights)
    segments = Segments.of([(0, numel // 2, 1.0), (numel // 2, max(numel - 1, 0), 0.0)])
    for step, grad in enumerate(grads(numel, 4, torch.bfloat16), 1):
        hyper = Hyper(step, 1e-3, 0.7)
        rule.update(ours, grad, segments, hyper)
        with monkeypatch.context() as patch:
            patch.setattr(rule, "_update_cpu", rule._update_torch, raising=False)
            rule.update(theirs, grad, segments, hyper)
    for name, view in ours.items():
        assert torch.equal(view, theirs[name]), name


def test_a_nan_gradient_shows_in_every_form_of_the_weight():
    for optim, precision in [*((AdamW(), p) for p in PRECISIONS), (AdamW(compact=True), "bf16")]:
        rule = rule_for(optim, precision)
        views = fresh(rule, torch.randn(300))
        grad = torch.zeros(300)
        grad[7] = math.nan
        rule.update(views, grad, Segments.whole(300), Hyper(1, 1e-3))
        assert rule.master(views)[7].isnan() and views["hi"][7].isnan(), (optim, precision)
        assert rule.master(views)[256:].isfinite().all()
    assert device_path.split8(torch.tensor([math.nan, math.inf]), 1)[0].isfinite().tolist() == [False, False]


def test_steps_count_from_one():
    rule = rule_for(AdamW(), "fp32")
    with pytest.raises(AssertionError, match="from 1"):
        rule.update(fresh(rule, torch.zeros(1)), torch.zeros(1), Segments.whole(1), Hyper(0, 1e-3))


def test_importing_the_optimizer_does_not_import_numba():
    code = "import sys, zft.optim; assert 'numba' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_works_where_no_cache_folder_is_writable():
    code = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
caching.CodeLibraryCacheImpl._locator_classes = caching.CompileResultCacheImpl._locator_classes = []
import torch
from zft.optim import kernels
assert type(kernels.sumsq._cache).__name__ == "NullCache", kernels.sumsq._cache
from zft.optim import sumsq_blocks
assert sumsq_blocks(torch.ones(70000)).tolist() == [65536, 4464]
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
