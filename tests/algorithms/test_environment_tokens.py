"""Tokens of an environment between those of the policy: any number of them leaves every function's result as it is."""

import pytest
import torch
from torch import Tensor

from flowrl import algorithms as a
from flowrl.algorithms.registry import advantage_estimators
from tests.algorithms.policy_cases import CASES as LOSSES
from tests.algorithms.policy_cases import gradient
from tests.algorithms.property_cases import CASES, Columns, columns
from tests.engines.closeness import assert_norm_close

TURN_ENDS = (2, 5)
"""Positions after which the environment has tokens."""

MASKED = [
    name for name, case in CASES.items() if "mask" in case.inputs and not {"hidden", "logits"}.intersection(case.inputs)
]
"""Functions whose columns belong to their own positions, without the hidden states or logits of the previous token."""

ESTIMATORS = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "reinforce_plus_plus": {"gamma": 0.9},
    "optimal_token_baseline": {},
    "opo": {},
    "grpo": {"normalize_std": True},
    "rloo": {},
    "reinforce_plus_plus_baseline": {},
    "gpg": {},
    "remax": {},
}


def with_environment(table: Columns, num_tokens: int, value: float = float("nan")) -> Columns:
    """Inserts masked tokens after each turn, with this value in all columns of numbers."""
    shape, inserted = table["mask"].shape, dict(table)
    for name, column in table.items():
        if column.shape != shape:
            continue
        filler = column.new_full((shape[0], num_tokens), value if column.is_floating_point() else 0)
        first, second, third = column.split((TURN_ENDS[0], TURN_ENDS[1] - TURN_ENDS[0], shape[1] - TURN_ENDS[1]), 1)
        inserted[name] = torch.cat((first, filler, second, filler, third), 1)
    return inserted


def without_environment(values: Tensor, num_tokens: int, shape: torch.Size) -> Tensor:
    """Removes the inserted tokens of a result per token. All of them are 0."""
    if values.dim() < 2 or values.shape[:2] != (shape[0], shape[1] + 2 * num_tokens):
        return values
    start = TURN_ENDS[1] + num_tokens
    index = [
        *range(TURN_ENDS[0]),
        *range(TURN_ENDS[0] + num_tokens, start),
        *range(start + num_tokens, values.shape[1]),
    ]
    others = [i for i in range(values.shape[1]) if i not in index]
    assert not values[:, others].any()
    return values[:, index]


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("name", MASKED)
def test_environment_tokens_change_no_result(name: str, num_tokens: int) -> None:
    table = columns(7)
    for actual, expected in zip(CASES[name](with_environment(table, num_tokens)), CASES[name](table), strict=True):
        assert_norm_close(without_environment(actual, num_tokens, table["mask"].shape), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_environment_tokens_have_no_gradient_and_change_no_other(name: str) -> None:
    table = columns(8)
    actual = gradient(LOSSES[name], with_environment(table, 3, value=-2.0))
    assert_norm_close(without_environment(actual, 3, table["mask"].shape), gradient(LOSSES[name], table))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_environment_tokens_change_no_advantage(name: str) -> None:
    estimator = advantage_estimators.load(name)
    names = advantage_estimators.inputs(estimator)
    table = columns(9) | {"rewards": columns(10)["advantages"], "values": columns(11)["advantages"]}
    table |= {"ref_logprobs": table["old_logprobs"], "sum_squared_probs": table["logprobs"].exp()}

    def advantages(given: Columns) -> Tensor:
        own = {n: given[n] for n in names if n in given and n != "importance_weights"}
        result = estimator(**own, **ESTIMATORS[name])
        return torch.stack(result, -1) if isinstance(result, tuple) else result

    actual = advantages(with_environment(table, 3))
    assert_norm_close(without_environment(actual, 3, table["mask"].shape), advantages(table))


def test_gae_continues_with_the_first_policy_token_of_the_next_turn() -> None:
    """Two turns of one token each, with three tokens of an environment between them, by hand."""
    mask = torch.tensor([[False, True, False, False, False, True]])
    rewards = torch.tensor([[9.0, 0.5, 9.0, 9.0, 9.0, 2.0]], dtype=torch.float64)
    values = torch.tensor([[9.0, 1.0, 9.0, 9.0, 9.0, 4.0]], dtype=torch.float64)
    advantages, returns = a.gae(rewards, values, mask, gamma=0.5, lam=0.5)
    last = 2.0 - 4.0
    first = (0.5 + 0.5 * 4.0 - 1.0) + 0.25 * last
    assert advantages.tolist() == [[0, first, 0, 0, 0, last]]
    assert returns.tolist() == [[0, first + 1.0, 0, 0, 0, last + 4.0]]
