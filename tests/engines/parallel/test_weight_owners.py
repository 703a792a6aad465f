"""The parts of ZeRO-1. test_strategies.py tests its steps."""

import pytest

from flowrl.engines.parallel.weight_owners import assign_owners


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "owners"),
    [
        ([1, 5, 3, 3], 2, [0, 0, 1, 1]),
        ([4, 4, 4], 3, [0, 1, 2]),
        ([7, 2], 4, [0, 1]),
        ([], 2, []),
        ([1, 2, 3], 1, [0, 0, 0]),
    ],
)
def test_the_largest_weights_come_first_on_the_rank_with_the_fewest_values(
    sizes: list[int], num_ranks: int, owners: list[int]
) -> None:
    assert assign_owners(sizes, num_ranks) == owners
