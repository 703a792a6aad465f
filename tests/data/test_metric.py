import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algorithms import Correlation, WeightSums
from flowrl.data.metric import Max, Mean, Min, Sum, merge_metrics


def test_a_mean_is_weighted_by_its_counts():
    assert Mean(6.0, 2).merge(Mean(0.0, 1)).result() == 2.0


def test_an_empty_mean_is_nan():
    assert math.isnan(Mean(0.0, 0).result())


def test_each_metric_kind_has_its_reduction():
    left = {"loss": Mean(4.0, 1), "rows": Sum(2), "longest": Max(3), "shortest": Min(3)}
    right = {"loss": Mean(2.0, 1), "rows": Sum(5), "longest": Max(7), "shortest": Min(7)}
    merged = {name: metric.result() for name, metric in merge_metrics([left, right]).items()}
    assert merged == {"loss": 3.0, "rows": 7, "longest": 7, "shortest": 3}


def test_a_metric_is_merged_over_the_ranks_that_report_it():
    assert merge_metrics([{"a": Sum(1)}, {}, {"a": Sum(2)}, {"b": Max(1)}]) == {"a": Sum(3), "b": Max(1)}


def test_merged_sums_of_several_dtypes_equal_the_total():
    # Weights 1, 3 and 2: (1 + 3 + 2)^2 / (1 + 9 + 4) / 3. Pairs (0, 0), (2, 2) and (1, 1) lie on a line.
    weights = [WeightSums(4.0, 10.0, 2), WeightSums(2.0, 4.0, 1)]
    pairs = [Correlation(2, 1.0, 1.0, 2.0, 2.0, 2.0), Correlation(1, 1.0, 1.0, 0.0, 0.0, 0.0)]
    reports = [{"share": w, "together": p} for w, p in zip(weights, pairs, strict=True)]
    merged = merge_metrics(reports)
    assert merged["share"].result() == pytest.approx(36 / 14 / 3)
    assert merged["together"].result() == pytest.approx(1.0)


def test_one_name_with_two_kinds_is_rejected():
    with pytest.raises(ValueError, match=r"'loss'.* Mean .*Sum"):
        merge_metrics([{"loss": Mean(1, 1)}, {"loss": Sum(1)}])


@given(st.lists(st.lists(st.integers(-50, 50), min_size=1), min_size=1))
def test_any_division_over_ranks_gives_the_same_mean(ranks: list[list[int]]):
    together = [value for rank in ranks for value in rank]
    merged = merge_metrics([{"x": Mean(sum(rank), len(rank))} for rank in ranks])
    assert merged["x"].result() == sum(together) / len(together)
