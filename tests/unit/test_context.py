"""Each micro-batch owns its torch context: nothing leaks between coroutines that park inside it."""

from contextlib import ExitStack

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zft.engine.context import TorchContext, stream_seed
from zft.engine.wave import MicroBatch

CPU = torch.device("cpu")


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def state() -> dict:
    context = TorchContext.capture(CPU)
    return {**vars(context), "rng_cpu": context.rng_cpu.tolist()}


def coroutine(number: int, run) -> MicroBatch:
    micro_batch = MicroBatch(number, {}, None, run)
    micro_batch.context = TorchContext.capture(CPU).seeded(0, 0, number, CPU)
    return micro_batch


def interleave(*micro_batches: MicroBatch) -> None:
    """Resume all in turn until all are through."""
    while waiting := [mb for mb in micro_batches if not mb.finished]:
        for micro_batch in waiting:
            micro_batch.resume(CPU)


@pytest.mark.parametrize("order", [1, -1])
def test_parked_inside_no_grad_and_autocast(order):
    """Two micro-batches enter and leave their modes interleaved; neither sees the other's, and the caller sees none."""
    seen = []

    def without_grad(mb):
        with torch.no_grad():
            mb.park(None)
            seen.append(("no_grad", torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            mb.park(None)
        mb.park(None)
        seen.append(("after no_grad", torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    def with_autocast(mb):
        with torch.autocast("cpu", torch.bfloat16):
            mb.park(None)
            seen.append(("autocast", torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            assert product.dtype == torch.bfloat16
        mb.park(None)
        mb.park(None)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        seen.append(("after autocast", torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    before = state()
    interleave(*[coroutine(0, without_grad), coroutine(1, with_autocast)][::order])
    assert state() == before
    assert sorted(seen) == [
        ("after autocast", True, False),
        ("after no_grad", True, False),
        ("autocast", True, True),
        ("no_grad", False, False),
    ]


def test_parked_inside_mode_stacks():
    """A default device (a function mode), a dispatch mode and saved-tensor hooks stay with who entered them."""
    counting, packed = Counting(), []

    def with_modes(mb):
        with ExitStack() as stack:
            stack.enter_context(torch.device("meta"))
            stack.enter_context(counting)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t))
            mb.park(None)
            assert torch.empty(1).is_meta
            mb.park(None)

    def plain(mb):
        for _ in range(3):
            mb.park(None)
            assert not torch.empty(1).is_meta
            (torch.ones(2, requires_grad=True) ** 2).sum().backward()

    before = state()
    interleave(coroutine(0, with_modes), coroutine(1, plain), coroutine(2, with_modes))
    assert state() == before and not packed
    assert counting.seen == 2  # one `empty` of each coroutine with the mode


def test_the_test_can_fail():
    """Without the swap, grad mode does leak between coroutines."""
    import greenlet

    def without_grad():
        with torch.no_grad():
            greenlet.getcurrent().parent.switch()

    inner = greenlet.greenlet(without_grad)
    inner.switch()
    leaked = not torch.is_grad_enabled()
    inner.switch()
    assert leaked and torch.is_grad_enabled()


def test_random_streams_do_not_depend_on_the_order_of_turns():
    def draws(mb):
        mb.result_list = [torch.rand(1).item()]
        for _ in range(3):
            mb.park(None)
            mb.result_list.append(torch.rand(1).item())

    together = [coroutine(n, draws) for n in range(3)]
    interleave(*together)
    alone = [coroutine(n, draws) for n in (2, 1, 0)]
    for micro_batch in alone:
        interleave(micro_batch)
    assert [mb.result_list for mb in together] == [mb.result_list for mb in reversed(alone)]
    assert len({tuple(mb.result_list) for mb in together}) == 3


def test_an_error_in_a_coroutine_leaves_the_caller_as_it_was():
    def fails(mb):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            mb.park(None)
            raise ValueError("in the model")

    before, micro_batch = state(), coroutine(0, fails)
    micro_batch.resume(CPU)
    with pytest.raises(ValueError, match="in the model"):
        micro_batch.resume(CPU)
    assert state() == before


def test_an_abandoned_coroutine_unwinds_in_its_own_context():
    left = []

    def waits(mb):
        try:
            with torch.no_grad():
                mb.park(None)
        finally:
            left.append(torch.is_grad_enabled())

    before, micro_batch = state(), coroutine(0, waits)
    micro_batch.resume(CPU)
    micro_batch.abandon()
    assert micro_batch.finished and left == [True] and state() == before


def test_seeds_differ_in_each_of_their_parts():
    seeds = {stream_seed(seed, step, mb) for seed in range(4) for step in range(16) for mb in range(16)}
    assert len(seeds) == 4 * 16 * 16 and all(0 <= seed < 2**63 for seed in seeds)
