"""`engine.overlap_all_reduce`: gradients that are summed during the last backward pass equal those summed after it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from flowrl.engines.parallel import gradients
from flowrl.engines.parallel.gradients import ReplicatedGradients
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS
from tests.engines.closeness import assert_norm_close
from tests.engines.overlap_ranks import CASES, FAILURE, main
from tests.processes import run_ranks

RTOL = 1e-12
"""Bound of four ranks: only the order of the sum of four float64 numbers differs, in three steps."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Returns the results of four processes, each by (ranks, case, overlap)."""
    folder: Path = tmp_path_factory.mktemp("overlap")
    run_ranks(main, (folder,), 4)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("case", [*CASES, FAILURE])
def test_two_ranks_train_bitwise_the_same_weights_with_overlap(results: list[dict], case: str) -> None:
    """The sum of two numbers does not depend on their order."""
    for rank in range(2):
        plain, overlapped = (results[rank][2, case, overlaps] for overlaps in (False, True))
        assert overlapped["reports"] == plain["reports"] and overlapped["scale"] == plain["scale"]
        assert all(torch.equal(overlapped["weights"][name], weight) for name, weight in plain["weights"].items())


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_of_which_one_has_no_rows_train_the_same_weights_with_overlap(
    results: list[dict], case: str
) -> None:
    for rank in range(4):
        plain, overlapped = (results[rank][4, case, overlaps] for overlaps in (False, True))
        assert_norm_close(overlapped["weights"], plain["weights"], RTOL if case != "float16" else None)
        assert [report and report["skipped_update"] for report in overlapped["reports"]] == [
            report and report["skipped_update"] for report in plain["reports"]
        ]


def test_steps_with_infinite_gradients_are_skipped(results: list[dict]) -> None:
    for case, reports in (("float16", [1.0, 0.0, 0.0]), ("a gradient of NaN", [None, 0.0, 0.0])):
        overlapped = results[0][2, case, True]["reports"]
        assert [report and report["skipped_update"] for report in overlapped] == reports


def test_ranks_with_different_numbers_of_rows_hold_bitwise_equal_weights(results: list[dict]) -> None:
    for rank in range(1, 4):
        for case in CASES:
            first, other = (results[r][4, case, True]["weights"] for r in (0, rank))
            assert all(torch.equal(first[name], other[name]) for name in first)


def test_the_sum_begins_before_the_last_backward_pass_ends(results: list[dict]) -> None:
    """Without overlap, one all-reduce follows the last backward pass. The number of micro-batches differs."""
    for rank in range(2):
        plain, overlapped = results[rank]["operations"]
        num_passes = plain.count("embedding_dense_backward")
        assert num_passes == overlapped.count("embedding_dense_backward")
        assert plain == ["embedding_dense_backward"] * num_passes + ["allreduce_"]
        # The embeddings are the last bucket. The sum of the other buckets begins in the last pass only.
        num_buckets = overlapped.count("allreduce_")
        assert num_buckets > 3
        expected = ["embedding_dense_backward"] * (num_passes - 1) + ["allreduce_"] * (num_buckets - 1)
        assert overlapped == [*expected, "embedding_dense_backward", "allreduce_"]
    assert results[0]["operations"][0] != results[1]["operations"][0]


def test_buckets_cover_the_gradients_from_the_last_parameter_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket has at least 40 bytes: 10 float32 numbers, or 5 float64 numbers."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 40)
    sizes = (7, 2, 12, 9, 1)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes] + [nn.Parameter(torch.zeros(3).double())]
    trained = ReplicatedGradients(parameters, SINGLE_PROCESS, overlaps=True)
    trained.zero()
    buckets = list(trained._buckets())
    assert [len(bucket.gradients) for bucket in buckets] == [10, 12, 9, 3]
    members = [[parameters[i] for i in indices] for indices in ((4, 3), (2,), (1, 0), (5,))]
    assert [bucket.incomplete for bucket in buckets] == [{id(p) for p in own} for own in members]
    whole = ReplicatedGradients(parameters, SINGLE_PROCESS)
    whole.zero()
    assert [len(bucket.gradients) for bucket in whole._buckets()] == [31, 3]
