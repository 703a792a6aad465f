"""Selection of groups and rows by their scores, with hand-computed values."""

import math
from typing import Any

import numpy as np
import pytest

from flowrl.config import DynamicSampling
from flowrl.data.batch.batch import Batch
from flowrl.rewards.row_scorer import FAILED
from flowrl.schedules.group_filter import GroupFilter, SelectedGroup, no_groups_message


def make_filter(*, drops_failed: bool = True, samples: int = 4, **dynamic: Any) -> GroupFilter:
    sampling = DynamicSampling(**dynamic) if dynamic else None
    return GroupFilter(sampling, samples=samples, drops_failed=drops_failed)


@pytest.mark.parametrize(
    ("scores", "failed", "rows", "reason", "success"),
    [
        ([0, 1, 1, 0], [0, 0, 0, 0], (0, 1, 2, 3), None, 0.5),
        ([1, 1, 1, 1], [0, 0, 0, 0], (), "equal_scores", 1.0),
        ([0, 1, 0, 0], [0, 1, 0, 0], (), "equal_scores", 0.0),  # the score of a failed row does not count
        ([0, 1, 1, 0], [1, 0, 0, 0], (1, 2, 3), None, 2 / 3),
        ([0, 1, 0, 0], [1, 0, 1, 1], (), "failed", 1.0),
        ([0, 0, 0, 0], [1, 1, 1, 1], (), "failed", math.nan),
    ],
)
def test_groups_and_rows_are_selected(
    scores: list[float],
    failed: list[int],
    rows: tuple[int, ...],
    reason: str | None,
    success: float,
) -> None:
    selected = make_filter(max_rounds=3).select_group(np.array(scores, float), np.array(failed, bool))
    assert (selected.rows, selected.reason) == (rows, reason)
    assert selected.success == pytest.approx(success, nan_ok=True)


def test_without_dynamic_sampling_only_failed_rows_are_dropped() -> None:
    chosen = make_filter()
    assert chosen.select_group(np.ones(4), np.array([0, 0, 1, 0], bool)) == SelectedGroup((0, 1, 3), None, 1.0)
    assert chosen.is_active
    assert not make_filter(drops_failed=False).is_active


def test_a_batch_is_selected_by_the_configured_column() -> None:
    columns = {"scores": np.array([0.0, 1, 2, 3]), "exact": np.array([1.0, 1, 0, 1])}
    chosen = make_filter(drops_failed=False, samples=2, column="exact")
    groups = chosen.select(Batch.from_columns(rows=columns))
    assert [group.reason for group in groups] == ["equal_scores", None]


def test_groups_to_which_the_column_does_not_apply_are_judged_by_their_scores() -> None:
    nan = math.nan
    columns = {
        "scores": np.array([0.0, 1, 1, 1, 0, 1, 2, 2]),
        "task": np.array([nan, nan, nan, nan, 1, 1, 0, 1]),  # its data source has only the last two groups
    }
    groups = make_filter(drops_failed=False, samples=2, column="task").select(Batch.from_columns(rows=columns))
    assert [group.reason for group in groups] == [None, "equal_scores", "equal_scores", None]
    assert [group.success for group in groups] == [0.5, 1.0, 1.0, 0.5]


def test_rows_without_a_value_do_not_make_a_group_different() -> None:
    scores = np.array([1.0, math.nan, 1.0, math.nan])
    assert make_filter(column="exact").select_group(scores, np.zeros(4, bool)).reason == "equal_scores"


def test_failed_rows_have_no_success_although_they_are_trained() -> None:
    chosen = GroupFilter(None, samples=4, needs_success=True)
    failed = np.array([0, 0, 1, 1], bool)
    assert chosen.columns == ("scores", FAILED)
    assert chosen.select_group(np.array([1.0, 1, 0, 0]), failed) == SelectedGroup((0, 1, 2, 3), None, 1.0)


def test_the_error_of_a_step_without_groups_names_failed_rewards() -> None:
    assert "reward.on_failure" in no_groups_message(5, 2, {"equal_scores": 1, "failed": 3})
    assert "dynamic_sampling.max_rounds" in no_groups_message(5, 2, {"equal_scores": 10, "failed": 3})
