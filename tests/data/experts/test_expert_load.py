import numpy as np
import pytest

from flowrl.data.experts.expert_load import ExpertLoad, Statistic

COUNTS = np.array([[4, 0, 0, 0], [1, 1, 2, 0]])
SUMS = np.array([[2.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]])
"""Two layers with four tokens, one expert per token, and four experts."""


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("expert_load_max", 4.0),
        ("dead_experts", 0.5),
        # The first layer: 4 x 1 x 1/2. The second: 4 x (1/4 + 1/4 + 1/2) x 1/4.
        ("router_loss", 1.5),
    ],
)
def test_statistics_by_hand(statistic: Statistic, expected: float) -> None:
    assert ExpertLoad(statistic, COUNTS, SUMS).result() == pytest.approx(expected)


def test_a_merged_load_is_that_of_all_tokens() -> None:
    other = ExpertLoad("dead_experts", np.array([[0, 3, 1, 0], [0, 4, 0, 0]]), SUMS)
    # Only the last expert of each layer has no token.
    assert ExpertLoad("dead_experts", COUNTS, SUMS).merge(other).result() == pytest.approx(0.25)
