"""The difficulty filter and the curriculum, with prompts of known success."""

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest

from flowrl.config import DifficultyConfig
from flowrl.data.messages import DataError
from flowrl.data.order.epoch_order import EpochOrder
from flowrl.data.order.success_order import SuccessOrder

SAMPLES = 8


def make_order(
    num_rows: int,
    *,
    seed: int = 0,
    num_candidates: int = 1,
    weight: float = 1.0,
    initial: Sequence[float] | None = None,
    low: float | None = None,
    high: float | None = None,
    revisit: float = 0.0,
) -> tuple[SuccessOrder, EpochOrder]:
    epochs = EpochOrder([(num_rows, weight)], seed=seed)
    order = SuccessOrder(
        epochs,
        num_rows,
        seed=seed,
        difficulty=DifficultyConfig(min=low, max=high, revisit=revisit),
        num_candidates=num_candidates,
        samples=SAMPLES,
        initial=None if initial is None else np.array(initial),
    )
    return order, epochs


def draw(order: SuccessOrder, epochs: EpochOrder, count: int) -> list[int]:
    """Draws prompts. Returns their rows."""
    first = len(order)
    for _ in range(count):
        order.draw()
    return [epochs.row(order.position(prompt_id)) for prompt_id in range(first, len(order))]


def simulate(order: SuccessOrder, epochs: EpochOrder, rates: np.ndarray, *, num_steps: int) -> list[int]:
    """Returns the rows of all draws, 20 per step, after which their success is measured."""
    random, rows = np.random.default_rng(9), []
    for step in range(num_steps):
        rows += draw(order, epochs, 20)
        drawn = rows[-20:]
        order.record(range(20 * step, 20 * step + 20), (random.binomial(SAMPLES, rates[drawn]) / SAMPLES).tolist())
    return rows


def count_informative(rows: list[int], rates: np.ndarray) -> float:
    """Returns the expected fraction of groups with unequal scores."""
    rates = rates[rows]
    return float((1 - rates**SAMPLES - (1 - rates) ** SAMPLES).mean())


def test_without_measurements_a_filter_keeps_the_order_of_the_epoch() -> None:
    order, epochs = make_order(7, low=0.1, high=0.9)
    assert draw(order, epochs, 14) == [epochs.row(position) for position in range(14)]


def test_the_filter_skips_prompts_whose_measured_success_is_out_of_range() -> None:
    order, epochs = make_order(4, low=0.1, high=0.9)
    first = draw(order, epochs, 4)
    order.record([0, 1, 2, 3], [0.0, 0.1, 0.9, 1.0])
    assert set(draw(order, epochs, 8)) == {first[1], first[2]}


def test_an_initial_success_filters_from_the_first_epoch_on() -> None:
    order, epochs = make_order(4, initial=[0.0, 0.5, math.nan, 1.0], high=0.9, low=0.1)
    assert sorted(draw(order, epochs, 4)) == [1, 1, 2, 2]


def test_a_measurement_updates_the_initial_success() -> None:
    order, epochs = make_order(2, initial=[0.5, 0.5], low=0.4)
    first = draw(order, epochs, 1)[0]
    order.record([0], [0.0])
    # The initial success is one prompt older than the measurement, half of an epoch: it counts 2 ** (-1 / 2).
    decay = 0.5**0.5
    assert order.estimates[first] == pytest.approx(0.5 * decay / (decay + 1))
    assert set(draw(order, epochs, 3)) == {1 - first}


def test_groups_without_scores_are_no_measurement() -> None:
    order, epochs = make_order(3, low=0.5)
    draw(order, epochs, 3)
    order.record([0, 1], [math.nan, 0.25])
    assert order.estimates[~np.isnan(order.estimates)].tolist() == [0.25]


def test_a_filter_that_skips_every_prompt_is_an_error() -> None:
    order, epochs = make_order(3, initial=[1.0, 1.0, 1.0], high=0.9)
    with pytest.raises(DataError, match=r"data\.difficulty"):
        draw(order, epochs, 1)


def test_skipped_prompts_are_revisited_with_the_given_probability() -> None:
    order, epochs = make_order(1000, initial=[0.5] * 100 + [1.0] * 900, high=0.9, revisit=0.1)
    rows = draw(order, epochs, 2000)
    # Per epoch, 100 prompts in range and about 90 revisits: 0.474 of the draws, with a standard deviation of 0.01.
    assert sum(row >= 100 for row in rows) / 2000 == pytest.approx(0.474, abs=0.05)


def test_a_revisit_returns_a_prompt_to_the_range() -> None:
    order, epochs = make_order(10, initial=[0.0] * 10, low=0.1, revisit=0.5)
    row = draw(order, epochs, 1)[0]
    order.record([0], [1.0])
    assert order.estimates[row] > 0.1
    assert draw(order, epochs, 60).count(row) > 6


@pytest.mark.parametrize("seed", range(3))
def test_the_curriculum_draws_more_informative_groups_than_a_shuffle(seed: int) -> None:
    """Of 1,000 prompts, 70 % are solved, 20 % hopeless and 10 % between. Four epochs of draws."""
    rates = np.repeat([1.0, 0.0, 0.5], [700, 200, 100])
    fractions = {}
    for num_candidates in (1, 8):
        order, epochs = make_order(1000, seed=seed, num_candidates=num_candidates)
        rows = simulate(order, epochs, rates, num_steps=200)
        # All prompts are unknown at the beginning.
        fractions[num_candidates] = count_informative(rows[1000:], rates)
    assert fractions[1] == pytest.approx(0.1, abs=0.01)
    # At best, one of eight candidates is informative with a probability of 1 - 0.9 ** 8 = 0.57.
    assert fractions[8] > 0.35


def test_the_curriculum_revisits_solved_prompts_rarely_but_all_of_them() -> None:
    rates = np.repeat([1.0, 0.5], [200, 200])
    order, epochs = make_order(400, num_candidates=4)
    counts = np.bincount(simulate(order, epochs, rates, num_steps=400), minlength=400)
    assert counts[:200].min() >= 1
    assert counts[:200].sum() < 0.4 * counts[200:].sum()


def test_a_prompt_that_becomes_solvable_is_drawn_again() -> None:
    order, epochs = make_order(100, num_candidates=4)
    rates = np.zeros(100)
    simulate(order, epochs, rates, num_steps=20)
    rates[50] = 0.5
    first = len(order)
    random = np.random.default_rng(1)
    for _ in range(40):
        rows = draw(order, epochs, 20)
        order.record(range(len(order) - 20, len(order)), (random.binomial(8, rates[rows]) / 8).tolist())
    rows = [epochs.row(order.position(prompt_id)) for prompt_id in range(first, len(order))]
    # A shuffle draws it 8 times.
    assert rows.count(50) > 16


def test_prompts_in_flight_are_drawn_last() -> None:
    order, epochs = make_order(8, num_candidates=8)
    assert sorted(draw(order, epochs, 8)) == list(range(8))


def test_weights_of_files_are_those_of_the_candidates() -> None:
    epochs = EpochOrder([(50, 3.0), (50, 1.0)], seed=0)
    order = SuccessOrder(epochs, 100, seed=0, difficulty=DifficultyConfig(), num_candidates=2)
    rows = draw(order, epochs, 400)
    assert np.mean(np.array(rows) < 50) == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(("num_candidates", "high"), [(1, 0.9), (5, None), (3, 0.9)])
def test_a_restored_order_continues_exactly(num_candidates: int, high: float | None) -> None:
    rates = np.linspace(0, 1, 60)
    complete, epochs = make_order(60, num_candidates=num_candidates, high=high, revisit=0.1)
    simulate(complete, epochs, rates, num_steps=9)
    saved = json.loads(json.dumps(complete.state()))
    restored, _ = make_order(60, num_candidates=num_candidates, high=high, revisit=0.1)
    restored.restore(saved)
    assert [restored.position(i) for i in range(180)] == [complete.position(i) for i in range(180)]
    for order in (complete, restored):
        rows = draw(order, epochs, 30)
        order.record(range(len(order) - 30, len(order)), rates[rows].tolist())
        draw(order, epochs, 30)
    assert [restored.position(i) for i in range(240)] == [complete.position(i) for i in range(240)]
    assert restored.state() == complete.state()


def test_draws_depend_neither_on_the_batch_size_nor_on_the_global_random_state() -> None:
    first, epochs = make_order(30, num_candidates=4)
    second, _ = make_order(30, num_candidates=4)
    rows = draw(first, epochs, 60)
    np.random.seed(5)
    assert [row for count in (1, 20, 39) for row in draw(second, epochs, count)] == rows
    other, others = make_order(30, num_candidates=4, seed=1)
    assert draw(other, others, 60) != rows


def test_the_state_of_a_million_prompts_has_the_size_of_the_measurements() -> None:
    epochs = EpochOrder([(1_000_000, 1.0)], seed=0)
    order = SuccessOrder(epochs, 1_000_000, seed=0, difficulty=DifficultyConfig(max=0.9), samples=SAMPLES)
    for _ in range(2000):
        order.draw()
    order.record(range(2000), (np.random.default_rng(0).binomial(8, 0.5, 2000) / 8).tolist())
    assert len(json.dumps(order.state())) < 200_000
