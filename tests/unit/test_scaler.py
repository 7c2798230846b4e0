"""The loss scale against a hand-written table, and against the published rule in its own terms (iteration numbers)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zft.precision import LossScaler


def test_table():
    """window 3, hysteresis 2: (overflow, scale after it)."""
    table = [
        (False, 16),
        (False, 16),
        (False, 32),  # three good steps: doubled, hysteresis full
        (True, 32),
        (True, 16),
        (True, 8),  # the first overflow is forgiven, then one halving each
        (False, 8),
        (False, 8),
        (True, 4),  # two good steps don't refill
        (False, 4),
        (False, 4),
        (False, 8),  # a growth does
        (False, 8),
        (False, 8),
        (False, 16),
        (True, 16),
        (False, 16),
        (True, 8),
    ]
    scaler = LossScaler(scale=16, window=3)
    for row, (overflow, scale) in enumerate(table):
        scaler.update(overflow)
        assert scaler.scale == scale, f"row {row}"


def test_defaults():
    scaler = LossScaler()
    assert scaler.scale == 65536
    for _ in range(999):
        scaler.update(False)
    assert scaler.scale == 65536
    scaler.update(False)
    assert scaler.scale == 131072


def test_raises_at_the_floor():
    scaler = LossScaler(scale=2)
    for expected in (2, 1):
        scaler.update(True)
        assert scaler.scale == expected
    with pytest.raises(FloatingPointError, match="lowest loss scale 1"):
        scaler.update(True)


def published(overflows: list[bool], window: int, delayed_shift: int) -> list[float]:
    """DeepSpeed's update_scale in its terms: iteration of the last overflow, current hysteresis."""
    scale, hysteresis, last, scales = 2.0**40, delayed_shift, -1, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if delayed_shift == 1 or hysteresis == 1:
                scale = max(scale / 2, 1.0)
            else:
                hysteresis -= 1
            last = iteration
        elif (iteration - last) % window == 0:
            hysteresis, scale = delayed_shift, scale * 2
        scales.append(scale)
    return scales


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(1, 3), st.integers(0, 40))
def test_published_rule_also_across_a_saved_state(overflows, window, hysteresis, cut):
    scaler = LossScaler(2.0**40, window, hysteresis)
    for index, (overflow, scale) in enumerate(zip(overflows, published(overflows, window, hysteresis), strict=True)):
        if index == cut:
            state = scaler.state_dict()
            scaler = LossScaler(1.0, window, hysteresis)
            scaler.load_state_dict(state)
        scaler.update(overflow)
        assert scaler.scale == scale
