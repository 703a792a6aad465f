import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.report.page.downsampling import bucket_starts, envelope, evenly_kept, longest_fitting, rounded


def test_buckets_are_consecutive_and_of_nearly_equal_size() -> None:
    assert bucket_starts(10, 4).tolist() == [0, 2, 5, 7]
    assert bucket_starts(3, 4).tolist() == [0, 1, 2]
    assert bucket_starts(0, 4).tolist() == []


def test_an_envelope_has_mean_and_range_of_each_bucket() -> None:
    values = np.array([1.0, 3.0, 10.0, -2.0, 4.0])
    result = envelope(values, np.array([0, 2]))  # buckets [1, 3] and [10, -2, 4]
    assert result.mean.tolist() == [2.0, 4.0]
    assert result.min.tolist() == [1.0, -2.0]
    assert result.max.tolist() == [3.0, 10.0]


def test_the_envelope_of_no_points_is_empty() -> None:
    assert [part.tolist() for part in envelope(np.array([]), bucket_starts(0, 5))] == [[], [], []]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 50))
def test_an_envelope_keeps_the_extremes_and_the_mean(values: list[float], max_buckets: int) -> None:
    array = np.array(values)
    starts = bucket_starts(len(values), max_buckets)
    result = envelope(array, starts)
    assert len(result.mean) == min(len(values), max_buckets)
    assert (result.min.min(), result.max.max()) == (array.min(), array.max())
    sizes = np.diff(np.append(starts, len(values)))
    assert np.isclose((result.mean * sizes).sum() / len(values), array.mean(), atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "budget", "limit"),
    [
        ([3, 5, 10], 18, 10),  # everything fits
        ([3, 5, 10], 14, 6),  # 3 + 5 + 6
        ([3, 5, 10], 8, 2),  # 2 + 2 + 2, because 3 + 2 + 2 would be a limit of 3 with the sum 9
        ([], 5, 0),
        ([4, 4], 1, 0),
    ],
)
def test_texts_are_cut_at_the_largest_limit_that_fits(lengths: list[int], budget: int, limit: int) -> None:
    assert longest_fitting(lengths, budget) == limit
    assert sum(min(length, limit) for length in lengths) <= budget


@pytest.mark.parametrize(
    ("sizes", "budget", "kept"),
    [
        ([4, 4, 4], 12, [0, 1, 2]),
        ([4, 4, 4, 4, 4], 12, [0, 2, 4]),
        ([4, 4, 4], 8, [0, 2]),
        ([4, 4, 4], 5, [2]),
        ([9], 5, [0]),
        ([], 5, []),
    ],
)
def test_kept_parts_are_evenly_spaced(sizes: list[int], budget: int, kept: list[int]) -> None:
    assert evenly_kept(sizes, budget) == kept


def test_numbers_are_short() -> None:
    values = rounded(np.array([1 / 3, 2.0, 1.23456789e-7]))
    assert values == [0.333333, 2, 1.23457e-07]
    assert isinstance(values[1], int)
