"""Host buffers: alignment, exact size, lifetime; the CUDA copies' interface without CUDA."""

import gc

import pytest
import torch

from zft.tiers.cpu import Arena, aligned_empty
from zft.tiers.device import Streams
from zft.tiers.page import PAGE


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_001])
def test_aligned_empty(nbytes):
    buffer = aligned_empty(nbytes)
    assert buffer.shape == (nbytes,) and buffer.dtype == torch.uint8 and buffer.is_contiguous()
    assert nbytes == 0 or buffer.data_ptr() % PAGE == 0
    assert (buffer.fill_(3) == 3).all()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.skipif(not torch.sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_returns_to_the_system_with_the_last_view():
    nbytes = 64 << 20
    before = resident_bytes()
    buffer = aligned_empty(nbytes).fill_(1)
    view = buffer[1000:2000].view(torch.int16)
    del buffer
    gc.collect()
    assert resident_bytes() - before > nbytes * 0.9, "a view must keep the memory"
    assert (view == 257).all()
    del view
    gc.collect()
    assert resident_bytes() - before < nbytes * 0.1


@pytest.mark.parametrize("pin", [False, True])
def test_arena_hands_out_page_aligned_pieces_until_it_is_full(pin):
    with Arena(3 * PAGE + 1, pin=pin) as arena:
        assert arena.nbytes == 4 * PAGE
        assert arena.pinned == (pin and torch.cuda.is_available())
        pieces = [arena.take(n) for n in (1, PAGE + 1, 0)]
        assert [p.numel() for p in pieces] == [1, PAGE + 1, 0] and arena.used_bytes == 3 * PAGE
        for number, piece in enumerate(pieces):
            piece.fill_(number)
        assert all((piece == number).all() for number, piece in enumerate(pieces))
        with pytest.raises(AssertionError, match="is full"):
            arena.take(PAGE + 1)
    arena.close()
    assert pieces[1].sum() == PAGE + 1, "pieces outlive the arena"


def test_streams_on_the_cpu_are_done_at_once():
    streams = Streams("cpu")
    src, dst = torch.arange(5.0), torch.zeros(5)
    for copy in (streams.copy_h2d, streams.copy_d2h):
        event = copy(dst.zero_(), src, after=streams.record())
        assert torch.equal(dst, src) and event.done()
        event.wait_on_compute()
        event.synchronize()
    streams.join()
