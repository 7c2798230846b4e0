"""An element's new bits depend on that element only: not on chunks, tails, vector positions, segments or threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zft.config import SGD, AdamW, EngineConfig, Lion
from zft.optim import Hyper, Segments, make_rule
from zft.precision import resolve_precision

CASES = [
    (AdamW(weight_decay=0.1), "bf16"),
    (AdamW(weight_decay=0.1), "fp16"),
    (AdamW(weight_decay=0.1), "fp32"),
    (AdamW(weight_decay=0.1, compact=True), "bf16"),
    (SGD(weight_decay=0.1), "bf16"),
    (Lion(weight_decay=0.1), "bf16"),
]
IDS = ["adamw-bf16", "adamw-fp16", "adamw-fp32", "compact", "sgd", "lion"]
NUMEL = 8192 + 77


def run(optim, precision, grad_dtype, chunks, threads=None):
    """Three steps over the same record, cut into `chunks` [(start, end)]."""
    rule = make_rule(optim, resolve_precision(EngineConfig(precision=precision, optim=optim), "cpu"))
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(NUMEL, generator=generator) * torch.logspace(-30, 3, NUMEL)
    views = {f.name: torch.empty(f.entries(NUMEL), dtype=f.dtype) for f in rule.fields}
    rule.init(views, weights)
    blocks = {f.name: f.block for f in rule.fields}
    for step in range(1, 4):
        grad = (torch.randn(NUMEL, generator=generator) * torch.logspace(3, -20, NUMEL)).to(grad_dtype)

        def update(chunk, grad=grad, step=step):
            start, end = chunk
            part = {name: view[start // blocks[name] : -(-end // blocks[name])] for name, view in views.items()}
            rule.update(part, grad[start:end], Segments.whole(end - start), Hyper(step, 3e-4, 0.3))

        if threads is None:
            for chunk in chunks:
                update(chunk)
        else:
            list(threads.map(update, chunks))
    return views


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=10, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("optim", "precision"), CASES, ids=IDS)
def test_any_chunks(optim, precision, grad_dtype, data):
    align = 256 if getattr(optim, "compact", False) else 1
    cuts = data.draw(st.lists(st.integers(1, NUMEL // align - 1).map(lambda k: k * align), max_size=8, unique=True))
    edges = [0, *sorted(cuts), NUMEL]
    chunks = list(zip(edges, edges[1:], strict=False))
    whole = run(optim, precision, grad_dtype, [(0, NUMEL)])
    cut = run(optim, precision, grad_dtype, chunks)
    assert all(same_bits(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize(("optim", "precision"), CASES, ids=IDS)
def test_chunks_on_threads(optim, precision):
    chunks = [(start, min(start + 1024, NUMEL)) for start in range(0, NUMEL, 1024)]
    whole = run(optim, precision, torch.bfloat16, [(0, NUMEL)])
    with ThreadPoolExecutor(4) as threads:
        cut = run(optim, precision, torch.bfloat16, chunks, threads)
    assert all(same_bits(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_vector_position(precision):
    """One value at each of 70 positions, with every length of tail behind it."""
    rule = make_rule(AdamW(), resolve_precision(EngineConfig(precision=precision), "cpu"))
    seen = set()
    for position in range(70):
        for tail in (1, 2, 7, 8, 31, 64):
            n = position + tail
            views = {f.name: torch.empty(n, dtype=f.dtype) for f in rule.fields}
            rule.init(views, torch.full((n,), 0.1234567))
            rule.update(views, torch.full((n,), 0.7654321), Segments.of([(position, n, 1.0)]), Hyper(1, 1e-3))
            seen |= set(rule.master(views)[position:].view(torch.int32).tolist())
    assert len(seen) == 1


def test_this_test_can_fail():
    """A wrong grad_scale in one chunk is seen."""
    a = run(*CASES[0], torch.bfloat16, [(0, NUMEL)])
    b = run(*CASES[0], torch.bfloat16, [(0, 100), (101, NUMEL)])
    assert not same_bits(a["lo"], b["lo"])
