"""User-defined functions, named in the config as module:function."""

from typing import Any

import pytest
import torch

from flowrl.config import AdvantageConfig, ConfigError, OnPolicyConfig, UserError
from flowrl.data.batch.batch import Batch
from flowrl.run.advantages import Advantages
from flowrl.run.checks.config_checks import check_functions
from flowrl.workers.losses.configured_losses import policy_loss
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings, on_policy_settings

OWN = "tests.algorithms.own_functions"
SCORE = "recipes.quickstart.task:score"


def batch(**tokens: list[float]) -> Batch:
    rows = {"scores": torch.tensor([1.0, 3.0]), "group": [4, 4]}
    columns = {name: torch.tensor(values) for name, values in tokens.items()}
    mask = torch.tensor([False, True, True, False, False, True])
    return Batch.from_columns(rows=rows, tokens=columns | {"response_mask": mask}, lengths=[3, 3])


def compute(rows: Batch, config: AdvantageConfig) -> Batch:
    return Advantages(OnPolicyConfig.model_validate(on_policy_settings(algorithm=config))).compute(rows)[0]


def run_with(algorithm: dict[str, Any], reward: dict[str, str] | None = None, **actor: Any) -> GRPOConfig:
    settings = grpo_settings(algorithm=algorithm)
    settings["actor"] |= actor
    settings["reward"] = reward or {"function": "flowrl.rewards.final_number:score"}
    return GRPOConfig.model_validate(settings)


def test_an_estimator_gets_its_inputs_by_name_and_its_options() -> None:
    config = AdvantageConfig.select(f"{OWN}:sign", options={"bar": 2.0})
    assert compute(batch(), config).get("advantages").tolist() == [0, -1, -1, 0, 0, 1]


def test_an_estimator_may_read_any_column_and_an_optional_one() -> None:
    config = AdvantageConfig.select(f"{OWN}:with_bonus")
    with pytest.raises(UserError, match=r"algorithm\.estimator .*with_bonus.*\bbonus\b"):
        compute(batch(), config)
    rows = batch().union(Batch.from_columns({"bonus": torch.tensor([0.5, 1.0])}))
    assert compute(rows, config).get("advantages").tolist() == [0, 1.5, 1.5, 0, 0, 4]
    rows = rows.union(Batch.from_columns({"malus": torch.tensor([1.0, 2.0])}))
    assert compute(rows, config).get("advantages").tolist() == [0, 0.5, 0.5, 0, 0, 2]


def test_a_loss_declares_a_column_that_is_computed_from_the_whole_batch() -> None:
    settings = on_policy_settings(algorithm={"estimator": f"{OWN}:sign", "options": {"bar": 2.0}})
    settings["reward"] = {"function": SCORE}
    settings["actor"]["loss"] = {"kind": f"{OWN}:large_only", "options": {"bar": 0.5, "weight": 2.0}}
    config = OnPolicyConfig.model_validate(settings)
    check_functions(config)
    result = Advantages(config).compute(batch())[0]
    assert result.get("is_large").tolist() == [False, False, False, False, False, True]
    logprobs = torch.zeros(2, 3, requires_grad=True)
    columns = {name: result.get(name).view(2, 3) for name in ("advantages", "is_large")}
    mask = torch.tensor([[False, True, True], [False, False, True]])
    loss = policy_loss(config.actor).function(logprobs, torch.zeros(2, 3), mask, **columns)[0]
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[0, 0, 0], [0, 0, -2]]


def test_an_estimator_that_reads_values_gives_returns() -> None:
    result = compute(batch(values=[0.5] * 6), AdvantageConfig.select(f"{OWN}:with_critic"))
    assert result.get("advantages").tolist() == [0, -0.5, 0.5, 0, 0, 2.5]
    assert result.get("returns").tolist() == [0, 0, 1, 0, 0, 3]


def test_a_user_defined_kl_estimate_shapes_the_rewards() -> None:
    config = AdvantageConfig.select("rloo", kl_coef=0.5, kl_kind=f"{OWN}:squared")
    result = compute(batch(old_logprobs=[9.0, -1, -2, 9, 9, -1], ref_logprobs=[0.0, -3, -2, 0, 0, -1]), config)
    # The penalty is 0.5 * 4 on the first token of row 0; its score is -1 then, and that of row 1 is 3.
    assert result.get("token_rewards").tolist() == [0, -2, 1, 0, 0, 3]
    assert result.get("advantages").tolist() == [0, -4, -4, 0, 0, 4]


def test_a_result_of_another_shape_is_an_error() -> None:
    with pytest.raises(UserError, match=rf"algorithm\.estimator {OWN}:rows_only"):
        compute(batch(), AdvantageConfig.select(f"{OWN}:rows_only")).get("advantages")


@pytest.mark.parametrize(
    ("algorithm", "actor", "reason"),
    [
        ({"estimator": "nowhere:f"}, {}, r"algorithm\.estimator: .*ModuleNotFoundError"),
        ({"estimator": f"{OWN}:sign"}, {}, r"algorithm\.estimator: .*\bbar\b"),
        ({"estimator": f"{OWN}:half"}, {}, r"algorithm\.estimator: .*\bmask\b"),
        ({"estimator": "grpo"}, {"loss": f"{OWN}:sign"}, r"actor\.loss: .*\blogprobs\b"),
        (
            {"estimator": "grpo"},
            {"loss": {"kind": f"{OWN}:half", "options": {"wait": 1}}},
            r"actor\.loss: .*\bwait\b",
        ),
        ({"estimator": "grpo"}, {"kl_loss_kind": f"{OWN}:half"}, r"actor\.kl_loss_kind: .*\bref_logprobs\b"),
        ({"estimator": "grpo"}, {"aggregation": f"{OWN}:absent"}, r"actor\.aggregation: .*absent"),
        ({"estimator": "grpo", "correction": {"kind": "nowhere:f"}}, {}, r"algorithm\.correction\.kind: .*nowhere"),
        (
            {"estimator": "grpo", "shaping": [{"kind": "clip_rewards", "low": 0}, {"kind": f"{OWN}:scaled"}]},
            {},
            r"algorithm\.shaping\.1\.kind: .*\bby\b",
        ),
    ],
)
def test_an_unusable_function_is_rejected_before_the_start(
    algorithm: dict[str, Any], actor: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_functions(run_with(algorithm, **actor))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ({"function": "nowhere:f"}, r"reward\.function: .*ModuleNotFoundError"),
        ({"function": f"{OWN}:absent"}, r"reward\.function: .*AttributeError"),
        ({"function": f"{OWN}:NOT_A_FUNCTION"}, r"reward\.function: .*NOT_A_FUNCTION"),
        ({"function": f"{OWN}:sign"}, r"reward\.function: .*\bprompt\b"),
        ({"function": SCORE, "evaluation": "nowhere:f"}, r"reward\.evaluation: .*nowhere:f"),
    ],
)
def test_an_unusable_reward_is_rejected(reward: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_functions(run_with({"estimator": "grpo"}, reward))


def test_usable_functions_are_accepted() -> None:
    algorithm = {"estimator": f"{OWN}:sign", "options": {"bar": 0.5}, "correction": {"kind": f"{OWN}:kept_half"}}
    check_functions(
        run_with(algorithm, loss=f"{OWN}:half_reinforce", kl_loss_kind=f"{OWN}:squared", aggregation=f"{OWN}:tenth")
    )
