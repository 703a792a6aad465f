"""The inputs, checks and aggregation of a `Loss`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.config import ActorConfig, ModelConfig, OptimizerConfig
from flowrl.data.metric import Mean
from flowrl.engines.train.base import Denominators
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.losses.configured_losses import policy_loss
from flowrl.workers.losses.loss import BoundLoss, Loss, LossFunction, check_weight
from tests.errors import rejects

COMPUTED = ("logprobs", "entropy", "hidden", "topk_logprobs", "topk_ids")
MASK = torch.tensor([[False, True, True], [False, True, False], [False, False, False]])
LOGPROBS = torch.tensor([[0.0, -1.0, -2.0], [0.0, -4.0, 0.0], [0.0, 0.0, 0.0]])


def token_loss(logprobs: Tensor, mask: Tensor, advantages: Tensor, bonus: Tensor | None = None) -> Tensor:
    return -logprobs * advantages


def pair_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    return -logprobs.sum(-1).view(-1, 2).sum(-1)


def of_rest(logprobs: Tensor, **rest: Tensor) -> Tensor:
    return -logprobs


def with_setting(logprobs: Tensor, *, beta: float, floor: float = 0.0) -> Tensor:
    return -beta * logprobs


def micro(groups: list[int] | None = None, **columns: Tensor) -> MicroBatch:
    ids = torch.ones_like(MASK, dtype=torch.int64)
    tokens = {name: column for name, column in columns.items() if column.dim() > 1} | {"response_mask": MASK}
    rows = {name: column for name, column in columns.items() if column.dim() == 1}
    index = None if groups is None else torch.tensor(groups)
    return MicroBatch(ids, ids.bool(), tokens, rows, torch.arange(3), None, index, 0 if groups is None else 2)


def term(loss: Loss, batch: MicroBatch | None = None, counts: Denominators | None = None) -> tuple[float, dict]:
    computed = {"logprobs": LOGPROBS.clone().requires_grad_()}
    bound = BoundLoss.of(loss, {"response_mask": torch.bool}, COMPUTED, temperature=1.0)
    value, metrics = bound(computed, batch or micro(), counts or Denominators(6, 4, 2))
    return value.item(), dict(metrics)


# Columns.


def test_a_loss_reads_the_columns_that_its_parameters_name():
    available = ("input_ids", "response_mask", "advantages", "bonus", "other")
    expected = ("input_ids", "response_mask", "advantages")
    assert Loss(token_loss).read_columns(available, COMPUTED, "Actor") == (*expected, "bonus")
    assert Loss(token_loss).read_columns(available[:3], COMPUTED, "Actor") == expected


def test_a_missing_column_is_rejected_with_the_columns_that_exist():
    with rejects("token_loss", "advantages", "input_ids", "response_mask", "logprobs", "Actor"):
        Loss(token_loss).read_columns(("input_ids", "response_mask"), COMPUTED, "Actor")


def test_columns_may_have_other_names_than_parameters():
    loss = Loss(token_loss, columns={"advantages": "gains", "logprobs": "old_logprobs"}, mask=("kept", "response_mask"))
    available = ("input_ids", "response_mask", "gains", "old_logprobs")
    assert loss.read_columns(available, COMPUTED, "Actor") == (
        *("input_ids", "response_mask", "old_logprobs", "gains"),
    )
    assert loss.read_columns(("kept", *available), COMPUTED, "Actor")[1] == "kept"
    assert loss.computed_inputs(COMPUTED) == []


def test_candidates_and_groups_are_read_with_their_columns():
    def distill(topk_logprobs: Tensor, teacher: Tensor) -> Tensor:
        return -(teacher * topk_logprobs).sum(-1)

    available = ("input_ids", "response_mask", "teacher", "topk_ids", "pair", "size")
    by_column = Loss(distill, group="pair", group_size="size")
    assert set(by_column.read_columns(available, COMPUTED, "Actor")) == set(available)
    own = Loss(distill, topk=4)
    assert "topk_ids" not in own.read_columns(available, COMPUTED, "Actor")
    with rejects("topk_ids", "distill"):
        by_column.read_columns(("input_ids", "response_mask", "teacher", "pair", "size"), COMPUTED, "Actor")


def test_the_columns_of_the_policy_loss_follow_from_the_settings():
    def columns(**settings: Any) -> set[str]:
        config = {"model": ModelConfig(path=Path("model")), "optimizer": OptimizerConfig(lr=0.1)} | settings
        loss = policy_loss(ActorConfig.model_validate(config))
        available = ("input_ids", "response_mask", "old_logprobs", "advantages", "ref_logprobs", "selected")
        return set(loss.read_columns((*available, "behavior_logprobs"), COMPUTED, "Actor"))

    basic = {"input_ids", "response_mask", "old_logprobs", "advantages"}
    assert columns() == basic
    assert columns(kl_loss_coef=0.1) == basic | {"ref_logprobs"}
    assert columns(loss="decoupled_ppo") == basic | {"behavior_logprobs"}
    assert columns(loss="kl_cov") == basic | {"selected"}


# Checks of a loss.


@pytest.mark.parametrize(
    ("create", "facts"),
    [
        (lambda: Loss(with_setting), ("with_setting", "beta")),
        (lambda: Loss(with_setting, {"beta": 1.0, "gamma": 1.0}), ("gamma", "beta", "floor")),
        (lambda: Loss(token_loss, aggregation="mean"), ("mean", "row_mean", "token_mean")),
        (lambda: Loss(token_loss, aggregation="group_mean"), ("group", "group_size")),
        (lambda: Loss(pair_loss, group="pair"), ("group", "group_size")),
        (lambda: Loss(pair_loss, group="pair", group_size=0), ("group_size", "0")),
        (lambda: Loss(of_rest), ("of_rest", "reads")),
        (lambda: Loss(token_loss, reads=("x",)), ("token_loss", "reads")),
        (lambda: Loss(token_loss, columns={"gains": "x"}), ("gains", "advantages")),
        (lambda: Loss(lambda *inputs: inputs[0]), ("parameter",)),
        (lambda: Loss(3), ("int", "function")),  # pyright: ignore[reportArgumentType] (wrong on purpose)
        (lambda: check_weight(float("nan")), ("weight", "nan")),
        (lambda: check_weight("1"), ("weight", "1")),
    ],
)
def test_a_loss_that_contradicts_its_function_is_rejected(create: Callable[[], object], facts: tuple[str, ...]):
    with rejects(*facts):
        create()


# Values.


def test_token_losses_are_divided_by_the_tokens_of_the_step():
    value, metrics = term(Loss(token_loss), micro(advantages=torch.full((3, 3), 2.0)))
    assert value == pytest.approx(2 * (1 + 2 + 4) / 6)
    assert metrics == {"loss": Mean(14.0, 3.0)}


def test_optional_columns_and_settings_reach_the_function():
    def both(logprobs: Tensor, bonus: Tensor | None = None, *, scale: float) -> Tensor:
        return -logprobs * scale + (0 if bonus is None else bonus)

    assert term(Loss(both, {"scale": 3.0}))[0] == pytest.approx(3 * 7 / 6)
    assert term(Loss(both, {"scale": 3.0}), micro(bonus=torch.ones(3, 3)))[0] == pytest.approx((3 * 7 + 3) / 6)
    assert term(Loss(of_rest, reads=("bonus?",)))[0] == pytest.approx(7 / 6)


def test_row_losses_are_averaged_over_rows_with_trained_tokens():
    def row_loss(logprobs: Tensor, margin: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums_B = logprobs.sum(-1)
        return margin - sums_B, {"length": torch.ones_like(logprobs), "large": (sums_B < -3).float()}

    value, metrics = term(Loss(row_loss, aggregation="row_mean"), micro(margin=torch.tensor([1.0, 2.0, 100.0])))
    assert value == pytest.approx((4 + 6) / 4)
    assert metrics == {"loss": Mean(10.0, 2.0), "length": Mean(3.0, 3.0), "large": Mean(1.0, 2.0)}


def test_group_losses_are_averaged_over_groups_with_trained_tokens():
    def sums(logprobs: Tensor, groups: Tensor) -> Tensor:
        return torch.zeros(2).index_add(0, groups, -logprobs.sum(-1))

    loss = Loss(sums, group="pair", group_size="size", aggregation="group_mean")
    value, metrics = term(loss, micro([0, 0, 1]))
    assert value == pytest.approx(7 / 2) and metrics == {"loss": Mean(7.0, 1.0)}


def test_masked_tokens_have_no_effect_even_if_the_loss_is_nan_there():
    def dirty(logprobs: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, -logprobs, torch.nan)

    assert term(Loss(dirty))[0] == pytest.approx(7 / 6)


@pytest.mark.parametrize(
    ("function", "aggregation"),
    [
        (lambda logprobs: logprobs.sum(-1), "token_mean"),
        (lambda logprobs: logprobs, "row_mean"),
        (lambda logprobs: logprobs.sum(), "token_mean"),
        (lambda logprobs: None, "token_mean"),
        (lambda logprobs: (logprobs, 1.0), "token_mean"),
        (lambda logprobs: (logprobs, {"x": torch.zeros(2)}), "token_mean"),
        (lambda logprobs: logprobs.detach(), "token_mean"),
    ],
)
def test_a_wrong_result_is_rejected(function: LossFunction, aggregation: str):
    with rejects("loss", "lambda"):
        term(Loss(function, aggregation=aggregation))


def test_a_column_of_objects_is_rejected():
    with rejects("advantages", "token_loss"):
        term(Loss(token_loss))
