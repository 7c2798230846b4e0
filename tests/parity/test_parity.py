"""The engine equals a plain loop: every pair of settings, every architecture. scripts/parity.py runs every triple."""

import pytest
import torch

from tests.parity.cells import ARCHITECTURES, AXES, allowed, check_architecture, check_cell, matrix, name_of
from tests.parity.cover import combinations_of, cover, covered

CELLS = matrix(2)


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_pairs_of_settings(cell):
    check_cell(cell, steps=4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name):
    """Two ranks, and the graph kept or recomputed in turn."""
    activation = "none" if "router loss" in name else "full"
    check_architecture(name, 2, activation)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["none", "selective", "offload"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_with_other_activations(name, activation):
    check_architecture(name, 1, activation)


def test_every_pair_occurs():
    wanted = combinations_of(AXES, 2, allowed)
    assert wanted == covered(CELLS, 2)
    assert frozenset({("optimizer", "compact"), ("precision", "fp16")}) not in wanted


def test_cover_is_small_and_the_same_each_time():
    axes = {"a": range(3), "b": range(3), "c": range(3), "d": range(2)}
    cells = cover(axes, 2, lambda _cell: True)
    assert cells == cover(axes, 2, lambda _cell: True)
    assert 9 <= len(cells) <= 13


def test_a_wrong_engine_is_found(monkeypatch):
    """The reference with another decay rule no longer equals the engine."""
    import tests.plain as plain

    monkeypatch.setattr(plain, "rounded", lambda master, precision: master * 1.001)
    cell = next(c for c in matrix(2, 200) if (c["world"], c["precision"], c["optimizer"]) == (1, "fp32", "adamw"))
    from tests.parity.cells import reference

    reference.cache_clear()
    with pytest.raises(AssertionError, match="differs by"):
        check_cell(cell, steps=1)
    reference.cache_clear()


def test_plain_rounding_is_to_nearest_ties_away():
    from tests.plain import rounded

    ties = torch.tensor([1 + 2**-8, -(1 + 2**-8), 1 + 2**-9], dtype=torch.float32)
    assert rounded(ties, "bf16").tolist() == [1 + 2**-7, -(1 + 2**-7), 1.0]
