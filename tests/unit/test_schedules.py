"""Learning-rate schedules against transformers' own, and the values that reports of other tools got wrong."""

import pytest
import torch

from zft.config import ZftError
from zft.optim.schedules import SCHEDULES, WSD_DECAY_SHARE, lr_at


def test_linear_is_zero_after_the_last_update():
    used = [lr_at(k, "linear", 1.0, 0, 10) for k in range(10)]
    assert used == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], abs=1e-15)
    assert lr_at(10, "linear", 1.0, 0, 10) == 0.0


@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (10, 10), (1, 1), (0, 1), (7, 50)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_transformers(schedule, warmup, total):
    get_scheduler = pytest.importorskip("transformers").get_scheduler
    name, extra = schedule, {}
    if schedule == "constant":
        name = "constant_with_warmup"
    if schedule == "wsd":
        decay = min(total - warmup, max(1, round(total * WSD_DECAY_SHARE)))
        name, extra = "warmup_stable_decay", {"num_decay_steps": decay, "decay_type": "linear"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    if extra:
        theirs = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=extra)
    else:
        theirs = get_scheduler(name, optimizer, warmup, total)
    for step in range(total + 3):
        # transformers' cosine rises again after its end, and stays at the top where the warm-up is everything
        if schedule != "cosine" or step < total or (step == total and warmup < total):
            assert lr_at(step, schedule, 0.3, warmup, total) == pytest.approx(theirs.get_last_lr()[0], abs=1e-15), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_floor(schedule):
    assert lr_at(0, schedule, 2.0, 0, 100, 0.1) == 2.0
    assert lr_at(100, schedule, 2.0, 0, 100, 0.1) == pytest.approx(0.2)
    assert lr_at(500, schedule, 2.0, 0, 100, 0.1) == pytest.approx(0.2)
    values = [lr_at(k, schedule, 2.0, 0, 100, 0.1) for k in range(101)]
    assert values == sorted(values, reverse=True)


def test_unknown_name():
    with pytest.raises(ZftError, match="one of constant, linear, cosine, wsd, got cosin"):
        lr_at(0, "cosin", 1.0, 0, 1)
