"""Tests the update rule of the KL controllers, their state and their ranges."""

import json
import math
from dataclasses import FrozenInstanceError, asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms import AdaptiveKlControl, FixedKlControl

START = AdaptiveKlControl(coef=0.2, target=6.0, horizon=1000.0)


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (6.0, 0.2),  # on the target
        (6.6, 0.202),  # error 0.1, times 100 rows / 1000 = 0.01
        (5.4, 0.198),
        (60.0, 0.204),  # error 9, clipped to 0.2
        (0.0, 0.196),  # error -1, clipped to -0.2
        (math.inf, 0.204),
    ],
)
def test_adaptive_by_hand(kl: float, coef: float):
    assert START.update(kl, num_rows=100).coef == pytest.approx(coef, abs=1e-12)


def test_an_update_does_not_modify_the_controller():
    updated = START.update(60.0, num_rows=100)
    assert START.coef == 0.2 and replace(updated, coef=0.2) == START
    with pytest.raises(FrozenInstanceError):
        START.coef = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_two_updates_compound():
    assert START.update(60.0, 100).update(60.0, 100).coef == pytest.approx(0.2 * 1.02**2, abs=1e-12)


def test_a_step_without_rows_changes_nothing():
    assert START.update(60.0, num_rows=0) == START


def test_the_coefficient_converges_where_the_kl_equals_the_target():
    """A policy whose KL is 1.2 / coef has the target 6 at coef 0.2."""
    control = replace(START, coef=0.5)
    for _ in range(500):
        control = control.update(1.2 / control.coef, num_rows=200)
    assert control.coef == pytest.approx(0.2, rel=1e-6)


def test_fixed_coefficient_is_constant():
    control = FixedKlControl(0.05)
    assert control.update(100.0, num_rows=64) == control and control.coef == 0.05


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.floats(1e-6, 1e3), st.lists(st.floats(0, 1e6), max_size=20))
def test_a_restored_controller_continues_identically(coef: float, kls: list[float]):
    control = replace(START, coef=coef).update(7.0, 100)
    restored = AdaptiveKlControl(**json.loads(json.dumps(asdict(control))))
    for kl in kls:
        control, restored = control.update(kl, 64), restored.update(kl, 64)
    assert restored == control and control.coef > 0


def test_fixed_controller_is_restored():
    control = FixedKlControl(0.1)
    assert FixedKlControl(**json.loads(json.dumps(asdict(control)))) == control


def test_a_kl_that_is_not_a_number_is_rejected():
    with pytest.raises(ValueError, match=r"kl .*NaN"):
        START.update(math.nan, num_rows=1)


@pytest.mark.parametrize("num_rows", [-1, 5000])
def test_num_rows_that_could_zero_the_coefficient_are_rejected(num_rows: int):
    with pytest.raises(ValueError, match=rf"num_rows .*{num_rows}"):
        START.update(6.0, num_rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coef": -0.1}, r"coef .*-0\.1"),
        ({"coef": math.nan}, r"coef .*nan"),
        ({"coef": 0.0}, r"coef .*0"),
        ({"target": 0.0}, r"target .*0\.0"),
        ({"horizon": math.inf}, r"horizon .*inf"),
    ],
)
def test_settings_out_of_range_are_rejected(settings: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        AdaptiveKlControl(**{"coef": 0.2, "target": 6.0, "horizon": 1000.0} | settings)


def test_a_fixed_coefficient_may_be_zero_but_not_negative():
    assert FixedKlControl(0.0).coef == 0
    with pytest.raises(ValueError, match=r"coef .*-1"):
        FixedKlControl(-1.0)
