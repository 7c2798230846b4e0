"""The placement before the planner: the first tier that holds the state."""

from __future__ import annotations

import pytest

from zft.config import EngineConfig, Tier, ZftError
from zft.tiers.plan import describe, place

AUTO = ("param_tier", "state_tier", "grad_tier")
GIB = 2**30


def free(device: float, cpu: float, nvme: float) -> dict[str, int]:
    return {Tier.device: int(device * GIB), Tier.cpu: int(cpu * GIB), Tier.nvme: int(nvme * GIB)}


@pytest.mark.parametrize(
    ("room", "tier"),
    [((30, 1, 1), Tier.device), ((20, 30, 1), Tier.cpu), ((20, 20, 30), Tier.nvme), ((30, 30, 30), Tier.device)],
)
def test_the_first_that_fits(room, tier):
    made = place(EngineConfig(), AUTO, GIB, 1, free(*room))
    assert (made.param_tier, made.state_tier, made.grad_tier) == (tier, tier, tier)
    assert f"weights {tier}" in describe(made)


def test_what_the_user_chose_stays():
    made = place(EngineConfig(param_tier=Tier.nvme), ("state_tier", "grad_tier"), GIB, 1, free(30, 30, 30))
    assert (made.param_tier, made.state_tier) == (Tier.nvme, Tier.device)
    assert place(EngineConfig(), (), 10**15, 1, free(0, 0, 0)) == EngineConfig()


def test_ranks_share_unless_they_replicate():
    assert place(EngineConfig(stage=3), AUTO, 4 * GIB, 4, free(30, 0, 0)).param_tier == Tier.device
    with pytest.raises(ZftError):
        place(EngineConfig(stage=0), AUTO, 4 * GIB, 4, free(30, 0, 0))


def test_a_refusal_has_numbers():
    with pytest.raises(ZftError, match=r"needs 16\.0 GiB .*device \(1\.0 GiB\), cpu \(2\.0 GiB\), nvme \(3\.0 GiB\)"):
        place(EngineConfig(), AUTO, GIB, 1, free(1, 2, 3))
