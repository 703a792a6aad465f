"""Pure functions that reduce the size of curves and texts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Envelope(NamedTuple):
    """A curve in buckets of consecutive points: the mean, the smallest and the largest value of each bucket."""

    mean: np.ndarray
    min: np.ndarray
    max: np.ndarray


def bucket_starts(num_points: int, max_buckets: int) -> np.ndarray:
    """Returns the index of the first point of each bucket.

    There are at most `max_buckets` buckets. Their sizes differ by at most one point.
    """
    num_buckets = min(num_points, max_buckets)
    return np.arange(num_buckets) * num_points // max(1, num_buckets)


def envelope(values: np.ndarray, starts: np.ndarray) -> Envelope:
    """Returns the envelope of finite `values` in the buckets that begin at `starts`."""
    if not len(values):
        return Envelope(values, values, values)
    sizes = np.diff(np.append(starts, len(values)))
    mean = np.add.reduceat(values, starts) / sizes
    return Envelope(mean, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts))


def longest_fitting(lengths: Sequence[int], budget: int) -> int:
    """Returns the largest n for which all texts, truncated to n characters, have at most `budget` characters in total.
    `lengths` has the number of characters of each text.

    The result is at least 0, and at most the longest length.
    """
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    left = budget
    for i, length in enumerate(ordered.tolist()):
        share = left // (len(ordered) - i)
        if share < length:
            return max(0, share)
        left -= length
    return int(ordered[-1]) if len(ordered) else 0


def evenly_kept(sizes: Sequence[int], budget: int) -> list[int]:
    """Returns evenly spaced indices of the items to keep, so that the sizes of these items sum to at most `budget`.

    The last item is always kept, even if it exceeds the budget. The first item is kept if both fit.
    """
    if sum(sizes) <= budget:
        return list(range(len(sizes)))
    low, high = 1, len(sizes)  # `low` items fit, or `low` is 1
    while high - low > 1:
        middle = (low + high) // 2
        if sum(sizes[i] for i in _spaced(middle, len(sizes))) <= budget:
            low = middle
        else:
            high = middle
    return _spaced(low, len(sizes))


def _spaced(count: int, total: int) -> list[int]:
    """Returns `count` evenly spaced indices from 0 to `total` - 1. A single index is the last one."""
    return [total - 1] if count == 1 else [i * (total - 1) // (count - 1) for i in range(count)]


def rounded(values: np.ndarray) -> list[float]:
    """Returns the values with 6 significant digits, and integers as integers, for a short JSON text."""
    return [int(value) if value == int(value) else float(f"{value:.6g}") for value in values.tolist()]
