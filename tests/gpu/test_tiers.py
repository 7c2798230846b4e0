"""The CUDA part of the tiers and the update on a GPU; runs wherever there is one."""

import time

import pytest
import torch

from zft.config import SGD, AdamW, EngineConfig, Lion
from zft.optim import Hyper, Segments, make_rule, sumsq_blocks
from zft.precision import resolve_precision
from zft.tiers.cpu import Arena
from zft.tiers.device import Streams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_arena_is_pinned_and_exact():
    with Arena(10_000_001) as arena:
        piece = arena.take(10_000_001)
        assert arena.pinned and piece.is_pinned()
        device = piece.fill_(5).to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert (device == 5).all()
    assert not piece.is_pinned() and (piece == 5).all()


@pytest.mark.parametrize("pin", [True, False])
def test_67_the_pin_memory_flag_is_honoured(pin):
    """Case 67: pinned bytes are what was asked, page by page, and none with pin_memory=false; the bits are the same."""
    from tests.toy import Toy, same_bits, square_loss, toy_batches, toy_config, weights_of
    from zft.api import Engine

    found = []
    for flag in (pin, True):
        settings = {"param_tier": "cpu", "state_tier": "cpu", "grad_tier": "cpu", "pin_memory": flag}
        with Engine(Toy(), toy_config(**settings)) as engine:
            engine.step(toy_batches(2)[0], loss_fn=square_loss)
            slabs = [record.slabs[name].tensor for record in engine.parts.records.values() for name in ("hi", "grad")]
            assert all(tensor.is_pinned() == flag for tensor in slabs)
            arenas = engine.parts.pinned.arenas
            assert bool(arenas) == flag and all(arena.nbytes - arena.used_bytes < 4096 for arena in arenas)
            found.append(weights_of(engine))
    assert same_bits(*found)


def test_copies_arrive_in_order():
    streams = Streams("cuda")
    with Arena(64 << 20) as arena:
        src = arena.take(32 << 20).view(torch.float32).fill_(1.0)
        back = arena.take(32 << 20).view(torch.float32)
        slot = torch.empty_like(src, device="cuda")
        for value in range(1, 5):
            streams.copy_h2d(slot, src, after=streams.record()).wait_on_compute()
            torch.cuda._sleep(10_000_000)  # the copy out must wait for compute
            slot.mul_(2)
            event = streams.copy_d2h(back, slot)
            event.synchronize()
            assert event.done() and (back == 2.0 * value).all()
            src.fill_(value + 1)


def test_a_source_freed_at_once_is_still_copied():
    streams = Streams("cuda")
    with Arena(4 << 20) as arena:
        host = arena.take(4 << 20).view(torch.float32)
        for value in range(20):
            tensor = torch.full((1 << 20,), float(value), device="cuda")
            event = streams.copy_d2h(host, tensor)
            del tensor
            torch.full((1 << 20,), -1.0, device="cuda")  # would take the freed block
            event.synchronize()
            assert (host == value).all()


@pytest.mark.parametrize(
    ("optim", "precision"),
    [
        (AdamW(weight_decay=0.1), "bf16"),
        (AdamW(weight_decay=0.1), "fp16"),
        (AdamW(), "fp32"),
        (AdamW(compact=True), "bf16"),
        (SGD(weight_decay=0.1), "bf16"),
        (Lion(weight_decay=0.1), "bf16"),
    ],
)
def test_update_equals_the_cpu_one(optim, precision):
    rule = make_rule(optim, resolve_precision(EngineConfig(precision=precision, optim=optim), "cuda"))
    generator = torch.Generator().manual_seed(0)
    n = 5000
    weights = torch.randn(n, generator=generator) * 0.02
    host = {f.name: torch.empty(f.entries(n), dtype=f.dtype) for f in rule.fields}
    rule.init(host, weights)
    device = {name: view.cuda() for name, view in host.items()}
    mixed = {name: view.cuda() if name == "hi" else view.clone() for name, view in host.items()}
    segments = Segments.of([(0, 2000, 1.0), (2048, n - 7, 0.0)])
    for step in range(1, 6):
        grad = torch.randn(n, generator=generator)
        rule.update(host, grad, segments, Hyper(step, 1e-3, 0.5))
        rule.update(device, grad.cuda(), segments, Hyper(step, 1e-3, 0.5))
        rule.update(mixed, grad.cuda(), segments, Hyper(step, 1e-3, 0.5))
    assert all(torch.equal(view.cpu(), host[name]) for name, view in mixed.items()), "hi alone on the device"
    ours, theirs = rule.master(device).cpu(), rule.master(host)
    if rule.align == 1:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    else:  # a last-bit difference may flip a rounding
        assert ((ours - theirs).abs() > 1e-6).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_squares(dtype):
    grad = torch.randn(200_001).to(dtype)
    torch.testing.assert_close(sumsq_blocks(grad.cuda()).cpu(), sumsq_blocks(grad), rtol=1e-12, atol=0)
    grad[70_000] = float("inf")
    assert sumsq_blocks(grad.cuda()).isfinite().tolist() == [True, False, True, True]


def test_copies_are_spans_on_the_hosts_clock():
    spans = []
    streams = Streams("cuda", lambda *span: spans.append(span))
    slot = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    with Arena(64 << 20) as arena:
        host = arena.take(64 << 20)
        first = time.perf_counter()
        streams.copy_h2d(slot, host, name="in").synchronize()
        streams.copy_d2h(host, slot, name="out").synchronize()
        last = time.perf_counter()
    assert not spans
    streams.report()
    streams.report()
    assert [span[:2] for span in spans] == [("h2d", "in"), ("d2h", "out")]
    (_, _, *into), (_, _, *out) = spans
    assert first - 1e-3 <= into[0] < into[1] <= out[0] + 1e-3 and out[0] < out[1] <= last + 1e-3
