from pathlib import Path

import pytest
import torch

from tests.engines.closeness import assert_norm_close
from tests.engines.ranks import NUM_STEPS, SPLITS, main, train
from tests.processes import run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Returns the results of three processes, each by (split, dtype)."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(main, (folder,), 3)
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


@pytest.fixture(scope="module")
def alone() -> dict:
    """Returns the results of one process with all rows in one micro-batch."""
    rows = list(range(11))
    return {dtype: train(rows, dtype, None, max_tokens=10_000) for dtype in (torch.float32, torch.float64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("split", SPLITS)
def test_any_split_over_ranks_trains_the_same_weights(results, alone, split: str, dtype: torch.dtype):
    expected = alone[dtype]["weights"]
    for rank in range(len(SPLITS[split])):
        weights = results[rank][split, dtype]["weights"]
        assert_norm_close(weights, expected)


@pytest.mark.parametrize("split", SPLITS)
def test_all_ranks_report_the_same_norm_and_rate(results, alone, split: str):
    expected = alone[torch.float64]["reports"]
    for rank in range(len(SPLITS[split])):
        for report, other in zip(results[rank][split, torch.float64]["reports"], expected, strict=True):
            assert report == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_hold_bitwise_equal_weights(results, split: str):
    first = results[0][split, torch.float32]["weights"]
    for rank in range(1, len(SPLITS[split])):
        other = results[rank][split, torch.float32]["weights"]
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_step_without_tokens_on_any_rank_is_skipped_by_all(results):
    reports = [results[rank]["two", torch.float32]["reports"] for rank in (0, 1)]
    assert [r[NUM_STEPS] for r in reports] == [{"skipped_update": 1.0}] * 2
    assert all(report["skipped_update"] == 0.0 for r in reports for report in r[:NUM_STEPS])
