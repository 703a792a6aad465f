"""Times edits of a batch of a million rows whose columns are in sixteen blocks."""

from collections.abc import Callable

import numpy as np

from flowrl import Batch
from tests.benchmarks.measure import Figure, alone, median_ms

ROWS, BLOCKS = 1_000_000, 16


def figures(repeats: int) -> list[Figure]:
    """Returns milliseconds per edit, for a batch as returned by calls and for a shuffled batch."""
    fresh = Batch({}, ROWS)
    for number in range(BLOCKS):
        fresh[f"c{number}"] = Batch.from_columns({"x": np.arange(ROWS)})
    order = np.random.default_rng(0).permutation(ROWS)
    mask = order % 2 == 0
    results = []
    for name, batch in (("", fresh), (", shuffled before", fresh.reorder(order))):
        edits: dict[str, Callable[[], object]] = {
            "select": lambda b=batch: b.select("c0", "c7"),
            "rows, by mask": lambda b=batch: b.rows(mask),
            "rows, by slice": lambda b=batch: b.rows(slice(ROWS // 4, None)),
            "repeat, twice": lambda b=batch: b.repeat(2),
            "reorder": lambda b=batch: b.reorder(order),
            "minibatches of 65,536, one epoch": lambda b=batch: list(b.minibatches(65_536)),
            "concat with itself": lambda b=batch: Batch.concat([b, b]),
        }
        for edit, call in edits.items():
            results.append(alone(f"{edit}, a million rows in 16 blocks{name}", "ms", median_ms(call, repeats), 50))
    return results
