"""Tests group statistics and group estimators with literals, NumPy formulas and shared properties."""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import gdpo, gpg, grpo, opo, pass_at_k, reinforce_plus_plus_baseline, rloo
from flowrl.algorithms.advantages.group_estimators import (
    group_deviations,
    group_extremes,
    group_index,
    group_sizes,
    group_sums,
)
from tests.algorithms.strategies import grouped_rows, masks, orders, quick
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]


def gdpo_of_one_reward(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Calls gdpo with one reward, with the signature of the other estimators."""
    return gdpo(scores[:, None], groups, mask)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": partial(grpo, normalize_std=True),
    "dr_grpo": partial(grpo, normalize_std=False),
    "rloo": rloo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "gpg_std": partial(gpg, normalize_std=True),
    "pass_at_n": pass_at_k,
    "pass_at_2": partial(pass_at_k, k=2),
    "pass_at_n_std": partial(pass_at_k, normalize_std=True),
    "gdpo": gdpo_of_one_reward,
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def of_rows(
    estimator: Callable[..., Tensor], scores: list[float], groups: list[int], **options: float | None
) -> Tensor:
    """Returns the advantages [B] of rows of one token."""
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    return estimator(torch.tensor(scores), torch.tensor(groups), mask, **options)[:, 0]


def by_group(formula: Callable[[np.ndarray], np.ndarray], scores: Tensor, groups: Tensor) -> np.ndarray:
    """Applies a NumPy formula to the scores of each group; a group of one gives 0.

    Computes with more digits than float64, because the deviations of nearly equal scores cancel.
    """
    actual = np.zeros(len(scores), dtype=np.longdouble)
    for group in set(groups.tolist()):
        members = (groups == group).numpy()
        if members.sum() > 1:
            actual[members] = formula(scores.numpy().astype(np.longdouble)[members])
    return actual


def assert_rows(advantages: Tensor, expected: np.ndarray) -> None:
    """Asserts that every token of a row has the expected value of the row, in float64."""
    columns = torch.from_numpy(expected.astype(np.float64))[:, None].expand_as(advantages)
    assert_close(advantages, columns, rtol=FLOAT64_RTOL, atol=FLOAT64_RTOL)


ROWS = grouped_rows()


@every_estimator
@quick
@given(data=st.data())
def test_permuted_rows_give_permuted_advantages(name: str, data: st.DataObject):
    scores, groups = data.draw(ROWS)
    mask, order = data.draw(masks(len(scores))), data.draw(orders(len(scores)))
    full = ESTIMATORS[name](scores, groups, mask)
    assert_norm_close(ESTIMATORS[name](scores[order], groups[order], mask[order]), full[order])


@every_estimator
@quick
@given(data=st.data())
def test_scores_that_are_equal_within_groups_give_exactly_zero(name: str, data: st.DataObject):
    _, groups = data.draw(ROWS)
    scores = torch.sin(groups.double()) + 0.1
    assert not ESTIMATORS[name](scores, groups, data.draw(masks(len(groups)))).any()


@every_estimator
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_score_affects_only_its_group(name: str, broken: float):
    scores = torch.tensor([1.0, broken, 4.0, 2.0, 3.0, 0.0, 7.0, 5.0])
    groups, mask = torch.tensor([5, 3, 9, 5, 3, 9, 9, 1]), torch.ones(8, 2, dtype=torch.bool).tril(1)
    mask[4, 0] = False
    actual, others = ESTIMATORS[name](scores, groups, mask), groups != 3
    assert actual[~others][mask[~others]].isnan().all() and not actual[~mask].any()
    without = ESTIMATORS[name](scores[others], groups[others], mask[others])
    assert_close(actual[others], without, rtol=1e-6, atol=1e-6)


def test_a_non_finite_reward_of_gdpo_affects_only_its_group():
    scores = torch.tensor([[1.0, 0.0], [0.0, float("inf")], [0.0, 1.0], [1.0, 1.0]])
    groups, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4, 1, dtype=torch.bool)
    actual = gdpo(scores, groups, mask)
    assert actual[:2].isnan().all()
    assert_norm_close(actual[2:], gdpo(scores[2:], groups[2:], mask[2:]), rtol=FLOAT64_RTOL)


@every_estimator
@quick
@given(data=st.data())
def test_advantages_are_constant_over_the_masked_in_tokens_of_a_row(name: str, data: st.DataObject):
    scores, groups = data.draw(ROWS)
    mask = data.draw(masks(len(scores)))
    advantages = ESTIMATORS[name](scores, groups, mask)
    assert advantages.shape == mask.shape and torch.isfinite(advantages).all()
    assert not advantages[~mask].any()
    for row, chosen in enumerate(mask):
        assert len(advantages[row, chosen].unique()) <= 1


@every_estimator
@quick
@given(ROWS)
def test_renamed_groups_change_nothing(name: str, rows: tuple[Tensor, Tensor]):
    scores, groups = rows
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    renamed = torch.unique(-groups, return_inverse=True)[1].to(torch.int32)
    assert_norm_close(ESTIMATORS[name](scores, renamed, mask), ESTIMATORS[name](scores, groups, mask))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gdpo"])
@quick
@given(data=st.data())
def test_a_shift_of_all_scores_changes_nothing(name: str, data: st.DataObject):
    scores, groups = data.draw(ROWS)
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    full = ESTIMATORS[name](scores.round(), groups, mask)
    assert_close(ESTIMATORS[name](scores.round() + 4096, groups, mask), full, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "reinforce_plus_plus_baseline"])
def test_a_group_of_one_gives_zero(name: str):
    advantages = of_rows(ESTIMATORS[name], [5.0, 1.0, 3.0], [9, 1, 1])
    assert advantages[0] == 0 and advantages[1] <= 0 < advantages[2]


@every_estimator
def test_a_row_without_tokens_counts_in_its_group(name: str):
    mask = torch.tensor([[False], [True], [True]])
    scores, groups = torch.tensor([0.0, 4.0, 1.0]), torch.tensor([1, 1, 2])
    if name == "opo":
        assert not opo(scores, groups, mask).any()
    else:
        assert ESTIMATORS[name](scores, groups, mask)[1] > 0


@every_estimator
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows_or_no_positions_give_an_empty_result(name: str, shape: tuple[int, int]):
    assert ESTIMATORS[name](torch.ones(shape[0]), torch.arange(shape[0]), torch.ones(shape).bool()).shape == shape


@every_estimator
def test_scores_of_bfloat16_are_computed_in_float32(name: str):
    scores, groups = torch.randn(32, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4
    mask = torch.ones(32, 2, dtype=torch.bool)
    low = ESTIMATORS[name](scores.bfloat16(), groups, mask)
    assert low.dtype == torch.float32
    exact = ESTIMATORS[name](scores.bfloat16().double(), groups, mask)
    assert_norm_close(low.double(), exact, reduction_rtol(torch.float32, length=len(scores), depth=3))


@every_estimator
def test_advantages_carry_no_gradient(name: str):
    scores = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not ESTIMATORS[name](scores, torch.tensor([0, 0]), torch.ones(2, 1).bool()).requires_grad


@every_estimator
def test_group_ids_that_are_not_integers_are_rejected(name: str):
    with pytest.raises(ValueError, match=r"groups .*torch\.float32"):
        ESTIMATORS[name](torch.ones(2), torch.ones(2), torch.ones(2, 1).bool())


@every_estimator
def test_a_mask_of_numbers_is_rejected(name: str):
    with pytest.raises(ValueError, match=r"mask .*torch\.float32"):
        ESTIMATORS[name](torch.ones(2), torch.ones(2).long(), torch.ones(2, 1))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gdpo"])
def test_scores_per_token_are_rejected(name: str):
    with pytest.raises(ValueError, match=r"scores .*\[2, 3\]"):
        ESTIMATORS[name](torch.ones(2, 3), torch.ones(2).long(), torch.ones(2, 3).bool())


def test_grpo_by_hand():
    # mean .5, unbiased std sqrt(4 * .25 / 3) = .5773503
    advantages = of_rows(grpo, [1, 0, 1, 0], [0, 0, 0, 0], normalize_std=True, eps=0.0)
    assert_close(advantages, torch.tensor([0.8660254, -0.8660254, 0.8660254, -0.8660254]))


def test_grpo_adds_eps_to_the_standard_deviation():
    # mean 1, std sqrt(2); 1 / (sqrt(2) + .1) = .6604130
    advantages = of_rows(grpo, [0, 2], [5, 5], normalize_std=True, eps=0.1)
    assert_close(advantages, torch.tensor([-0.6604130, 0.6604130]))


def test_grpo_without_std_is_the_difference_to_the_group_mean():
    advantages = of_rows(grpo, [3.0, 1.0, 5.0], [0, 0, 0], normalize_std=False)
    assert_close(advantages, torch.tensor([0.0, -2.0, 2.0]))


def test_grpo_groups_need_not_be_contiguous_or_equal_in_size():
    # group 7: 1, 3 (mean 2); group -2: 4, 1, 1 (mean 2)
    advantages = of_rows(grpo, [1, 4, 3, 1, 1], [7, -2, 7, -2, -2], normalize_std=False)
    assert_close(advantages, torch.tensor([-1.0, 2.0, 1.0, -1.0, -1.0]))


@quick
@given(ROWS)
def test_grpo_agrees_with_the_formula_in_numpy(rows: tuple[Tensor, Tensor]):
    expected = by_group(lambda x: (x - x.mean()) / (x.std(ddof=1) + 1e-4), *rows)
    assert_rows(ESTIMATORS["grpo"](*rows, torch.ones(len(rows[0]), 2).bool()), expected)


def test_rloo_by_hand():
    # group 4: 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2; group 5: 3 - 7, 7 - 3
    advantages = of_rows(rloo, [1.0, 3.0, 0.0, 2.0, 7.0], [4, 5, 4, 4, 5])
    assert_close(advantages, torch.tensor([0.0, -4.0, -1.5, 1.5, 4.0]))


@quick
@given(ROWS)
def test_rloo_agrees_with_the_mean_of_the_others(rows: tuple[Tensor, Tensor]):
    expected = by_group(lambda x: np.array([x[i] - np.delete(x, i).mean() for i in range(len(x))]), *rows)
    assert_rows(rloo(*rows, torch.ones(len(rows[0]), 2).bool()), expected)


def test_reinforce_plus_plus_baseline_by_hand():
    # deviations -1, 1 and -3, 3; rows of 2, 1, 1 and 1 tokens: -1, -1, 1, -3, 3; mean -.2, variance 20.8 / 4
    mask = torch.tensor([[True, True], [True, False], [False, True], [True, False]])
    advantages = reinforce_plus_plus_baseline(torch.tensor([0.0, 2.0, 1.0, 7.0]), torch.tensor([0, 0, 1, 1]), mask)
    expected = [[-0.3508232, -0.3508232], [0.5262348, 0.0], [0.0, -1.2278812], [1.4032928, 0.0]]
    assert_close(advantages, torch.tensor(expected))


@quick
@given(ROWS)
def test_reinforce_plus_plus_baseline_agrees_with_the_formula_in_numpy(rows: tuple[Tensor, Tensor]):
    deviations = np.repeat(by_group(lambda x: x - x.mean(), *rows), 2)
    expected = ((deviations - deviations.mean()) / np.sqrt(deviations.var(ddof=1) + 1e-8))[::2]
    assert_rows(reinforce_plus_plus_baseline(*rows, torch.ones(len(rows[0]), 2).bool()), expected)


def test_opo_by_hand():
    # lengths 3, 1: baseline (3 * 1 + 1 * 5) / 4 = 2; the row of another group has its own score
    mask = torch.tensor([[True, True, True], [False, True, False], [True, False, False]])
    advantages = opo(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([0, 0, 1]), mask)
    assert advantages.tolist() == [[-1.0, -1.0, -1.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]]


@quick
@given(st.data())
def test_opo_agrees_with_the_weighted_mean_in_numpy(data: st.DataObject):
    scores, groups = data.draw(ROWS)
    mask = data.draw(masks(len(scores)))
    advantages, lengths = opo(scores, groups, mask), mask.sum(-1).numpy()
    for row in mask.any(-1).nonzero()[:, 0].tolist():
        members = (groups == groups[row]).numpy()
        expected = scores[row].item() - float(np.average(scores.numpy()[members], weights=lengths[members]))
        assert_close(
            advantages[row][mask[row]], torch.full((int(lengths[row]),), expected).double(), rtol=1e-6, atol=1e-6
        )


@quick
@given(ROWS)
def test_opo_of_equal_lengths_is_dr_grpo(rows: tuple[Tensor, Tensor]):
    mask = torch.ones(len(rows[0]), 3, dtype=torch.bool)
    assert_norm_close(opo(*rows, mask), grpo(*rows, mask, normalize_std=False))


def test_gpg_by_hand():
    # groups 0: 1, 0 (mean .5); 1: 1, 1 (no signal); 2: alone. alpha = 5 / 2
    advantages = of_rows(gpg, [1.0, 1.0, 0.0, 1.0, 8.0], [0, 1, 0, 1, 2])
    assert advantages.tolist() == [1.25, 0.0, -1.25, 0.0, 0.0]


def test_gpg_can_divide_by_the_standard_deviation():
    # alpha 1, deviations -1 and 1, unbiased std sqrt(2)
    advantages = of_rows(gpg, [0.0, 2.0], [3, 3], normalize_std=True, eps=0.0)
    assert_close(advantages, torch.tensor([-0.7071068, 0.7071068]))


@quick
@given(ROWS)
def test_gpg_agrees_with_the_formula_in_numpy(rows: tuple[Tensor, Tensor]):
    silent = sum(len(set(rows[0][rows[1] == group].tolist())) == 1 for group in rows[1].tolist())
    alpha = len(rows[0]) / max(len(rows[0]) - silent, 1)
    assert_rows(gpg(*rows, torch.ones(len(rows[0]), 2).bool()), alpha * by_group(lambda x: x - x.mean(), *rows))


def pass_at_k_by_sets(scores: np.ndarray, k: int) -> np.ndarray:
    """Computes pass@k advantages by enumerating all sets of k rows."""
    actual = np.zeros(len(scores))
    for rows in combinations(range(len(scores)), k):
        for i in rows:
            actual[i] += max(scores[list(rows)]) - max(scores[[j for j in rows if j != i]])
    return actual / comb(len(scores), k)


def test_pass_at_k_with_k_of_the_group_size_is_the_gap_to_the_second_best_row():
    advantages = of_rows(pass_at_k, [1.0, 5.0, 2.0, 7.0, 7.0], [0, 0, 0, 1, 1])
    assert advantages.tolist() == [0.0, 3.0, 0.0, 0.0, 0.0]


def test_pass_at_k_divided_by_the_standard_deviation_of_the_group():
    # 5 is 3 above the second best; the unbiased variance of 1, 5, 2 is 13/3
    advantages = of_rows(pass_at_k, [1.0, 5.0, 2.0, 7.0, 7.0], [0, 0, 0, 1, 1], normalize_std=True, eps=0.0)
    assert_close(advantages, torch.tensor([0.0, 3 / (13 / 3) ** 0.5, 0.0, 0.0, 0.0]))


def test_pass_at_k_by_hand():
    # pairs of 0, 1, 3: the better of (0, 1) adds 1, of (0, 3) adds 3, of (1, 3) adds 2; three pairs
    advantages = of_rows(pass_at_k, [1.0, 3.0, 0.0], [0, 0, 0], k=2)
    assert_close(advantages, torch.tensor([1 / 3, 5 / 3, 0.0]))


def test_pass_at_k_with_one_correct_response():
    # one of eight is right: it is in 3 of every 8 sets of three, and decides each of them
    advantages = of_rows(pass_at_k, [0.0] * 7 + [1.0], [0] * 8, k=3)
    assert_close(advantages, torch.tensor([0.0] * 7 + [3 / 8]))


def test_pass_at_k_of_fewer_than_k_rows_is_zero():
    advantages = of_rows(pass_at_k, [0.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1, 1], k=3)
    assert_close(advantages, torch.tensor([0.0] * 5))


@pytest.mark.parametrize("k", [2, 3, 5, None])
@quick
@given(rows=ROWS)
def test_pass_at_k_agrees_with_all_sets_one_by_one(k: int | None, rows: tuple[Tensor, Tensor]):
    def formula(x: np.ndarray) -> np.ndarray:
        size = len(x) if k is None else k
        return pass_at_k_by_sets(x, size) if len(x) >= size else np.zeros(len(x))

    assert_rows(pass_at_k(*rows, torch.ones(len(rows[0]), 2).bool(), k=k), by_group(formula, *rows))


def test_pass_at_k_of_a_thousand_rows_is_finite_and_exact_for_pairs():
    # the best of n is better than every other by 1 when they are equal: n - 1 pairs of n (n - 1) / 2
    advantages = of_rows(pass_at_k, [0.0] * 999 + [1.0], [0] * 1000, k=2)
    assert_close(advantages[-1], torch.tensor(2 / 1000))


def test_pass_at_k_rejects_best_of_one():
    with pytest.raises(ValueError, match=r"k .*1"):
        of_rows(pass_at_k, [1.0, 2.0], [0, 0], k=1)


def test_gdpo_by_hand():
    # both rewards normalize to -+.7071068 in both groups; sums -1.4142136, 1.4142136 and 0, 0; std sqrt(4 / 3)
    scores = torch.tensor([[0.0, 0.0], [1.0, 10.0], [0.0, 30.0], [5.0, 10.0]])
    advantages = gdpo(scores, torch.tensor([0, 0, 1, 1]), torch.ones(4, 1).bool(), eps=0.0)
    assert_close(advantages[:, 0], torch.tensor([-1.2247449, 1.2247449, 0.0, 0.0]))


def test_gdpo_weights_normalized_rewards():
    # the same with weights 1 and 3: sums in units of .7071068 are -4, 4, 2, -2; std sqrt(40 / 3) of these units
    scores = torch.tensor([[0.0, 0.0], [1.0, 10.0], [0.0, 30.0], [5.0, 10.0]])
    advantages = gdpo(scores, torch.tensor([0, 0, 1, 1]), torch.ones(4, 1).bool(), reward_weights=(1, 3), eps=0.0)
    assert_close(advantages[:, 0], torch.tensor([-1.0954451, 1.0954451, 0.5477226, -0.5477226]))


def test_gdpo_distinguishes_rewards_with_equal_sums():
    # sums are 0, 1 and 0, 2: grpo gives both groups the same advantages
    scores, groups = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 0, 1, 1])
    advantages = gdpo(scores, groups, torch.ones(4, 1).bool())[:, 0]
    assert_close(advantages[3], 2 * advantages[1], rtol=1e-3, atol=0)


@quick
@given(ROWS, st.integers(1, 3))
def test_gdpo_agrees_with_the_formula_in_numpy(rows: tuple[Tensor, Tensor], num_rewards: int):
    scores, groups = torch.stack([rows[0].roll(k) * (k + 1) for k in range(num_rewards)], 1), rows[1]
    weights = [1.0, -0.5, 2.0][:num_rewards]
    sums = np.zeros(len(groups), dtype=np.longdouble)
    for k in range(num_rewards):
        sums += weights[k] * by_group(lambda x: (x - x.mean()) / (x.std(ddof=1) + 1e-4), scores[:, k], groups)
    expected = (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4) if len(sums) > 1 else np.zeros(1)
    assert_rows(gdpo(scores, groups, torch.ones(len(groups), 2).bool(), reward_weights=tuple(weights)), expected)


def test_gdpo_rejects_scores_without_a_column_per_reward():
    with pytest.raises(ValueError, match=r"scores .*\[2\]"):
        gdpo(torch.ones(2), torch.ones(2).long(), torch.ones(2, 1).bool())


def test_gdpo_rejects_weights_that_are_not_one_per_reward():
    with pytest.raises(ValueError, match=r"weights .*1"):
        gdpo(torch.ones(2, 2), torch.ones(2).long(), torch.ones(2, 1).bool(), reward_weights=(1.0,))


GROUP_OF = torch.tensor([1, 0, 1, 2])
VALUES = torch.tensor([1.0, 5.0, 4.0, -2.0], dtype=torch.float64)


def test_group_index_numbers_ids_in_their_order():
    assert group_index(torch.tensor([7, -3, 7, 10**12])).tolist() == GROUP_OF.tolist()


@pytest.mark.parametrize("groups", [torch.ones(2), torch.ones(2).bool(), torch.ones(2, dtype=torch.complex64)])
def test_group_index_rejects_ids_that_are_not_integers(groups: Tensor):
    with pytest.raises(ValueError, match="groups"):
        group_index(groups)


def test_group_index_rejects_ids_per_token():
    with pytest.raises(ValueError, match=r"groups .*\[2, 3\]"):
        group_index(torch.ones(2, 3).long())


def test_group_sums_extremes_and_sizes_by_hand():
    assert group_sums(VALUES, GROUP_OF).tolist() == [5.0, 5.0, 5.0, -2.0]
    low, high = group_extremes(VALUES, GROUP_OF)
    assert low.tolist() == [1.0, 5.0, 1.0, -2.0] and high.tolist() == [4.0, 5.0, 4.0, -2.0]
    assert group_sizes(GROUP_OF).tolist() == [2.0, 1.0, 2.0, 1.0]


def test_group_deviations_by_hand():
    deviations, variances = group_deviations(VALUES, GROUP_OF)
    assert deviations.tolist() == [-1.5, 0.0, 1.5, 0.0] and variances.tolist() == [4.5, 0.0, 4.5, 0.0]


def test_group_statistics_are_computed_per_column():
    columns = torch.stack([VALUES, -2 * VALUES], 1)
    assert_norm_close(group_sums(columns, GROUP_OF)[:, 1], -2 * group_sums(VALUES, GROUP_OF), rtol=FLOAT64_RTOL)
    assert_norm_close(
        group_extremes(columns, GROUP_OF)[0][:, 1], -2 * group_extremes(VALUES, GROUP_OF)[1], rtol=FLOAT64_RTOL
    )
    assert_norm_close(
        group_deviations(columns, GROUP_OF)[1][:, 1], 4 * group_deviations(VALUES, GROUP_OF)[1], rtol=FLOAT64_RTOL
    )


def test_group_indices_may_exceed_the_number_of_rows_with_num_groups():
    assert group_sums(VALUES, GROUP_OF + 96, num_groups=100).tolist() == [5.0, 5.0, 5.0, -2.0]


@quick
@given(grouped_rows())
def test_group_deviations_agree_with_numpy(rows: tuple[Tensor, Tensor]):
    values, groups = rows
    deviations, variances = group_deviations(values, group_index(groups))
    for row, group in enumerate(groups):
        x = values[groups == group].numpy()
        assert abs(deviations[row] - (values[row] - x.mean())) < 1e-9
        assert abs(variances[row] - (x.var(ddof=1) if len(x) > 1 else 0)) < 1e-6


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e300, -7.3])
def test_group_deviations_of_equal_values_are_exactly_zero(value: float):
    deviations, variances = group_deviations(torch.full((7,), value, dtype=torch.float64), torch.zeros(7).long())
    assert not deviations.any() and not variances.any()
