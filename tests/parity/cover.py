"""A small set of cells in which every combination of values of any few axes occurs (greedy, deterministic)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product

Cell = dict[str, object]
CANDIDATES = 40
"""Random completions tried for each new cell; the one that covers most is kept."""


def cover(axes: Mapping[str, Sequence], strength: int, allowed: Callable[[Cell], bool], seed: int = 0) -> list[Cell]:
    """Cells such that each allowed combination of values of `strength` axes is in one. `allowed` sees whole cells."""
    chance = random.Random(seed)
    missing, cells = combinations_of(axes, strength, allowed, chance), []
    while missing:
        goal = min(missing, key=lambda part: sorted(map(str, part)))
        candidates = [c for _ in range(CANDIDATES) if (c := _complete(axes, dict(goal), allowed, chance)) is not None]
        best = max(candidates, key=lambda cell: len(_within(cell, strength) & missing))
        missing -= _within(best, strength)
        cells.append(best)
    return cells


def fill_up(
    cells: list[Cell], count: int, axes: Mapping[str, Sequence], allowed: Callable[[Cell], bool], seed: int = 1
) -> list[Cell]:
    """At least `count` different cells: the given ones and random others."""
    chance, cells = random.Random(seed), list(cells)
    while len(cells) < count:
        cell = _complete(axes, {}, allowed, chance)
        if cell is not None and cell not in cells:
            cells.append(cell)
    return cells


def combinations_of(
    axes: Mapping[str, Sequence], strength: int, allowed: Callable[[Cell], bool], chance: random.Random | None = None
) -> set:
    """Every combination of `strength` values that some allowed cell contains, as a frozenset of (axis, value)."""
    found, chance = set(), chance or random.Random(0)
    for names in combinations(axes, strength):
        for values in product(*(axes[name] for name in names)):
            fixed = dict(zip(names, values, strict=True))
            if any(_complete(axes, fixed, allowed, chance) is not None for _ in range(8)):
                found.add(frozenset(fixed.items()))
    return found


def covered(cells: Iterable[Cell], strength: int) -> set:
    return set().union(*(_within(cell, strength) for cell in cells))


def _within(cell: Cell, strength: int) -> set:
    return {frozenset(part) for part in combinations(cell.items(), strength)}


def _complete(axes, fixed: Cell, allowed, chance: random.Random) -> Cell | None:
    """A random allowed cell with the fixed values; None if a few tries find none."""
    for _ in range(16):
        cell = {name: fixed[name] if name in fixed else chance.choice(values) for name, values in axes.items()}
        if allowed(cell):
            return cell
    return None
