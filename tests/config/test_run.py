"""Roles of a run, and the settings of a run that follow from others: the reference, the temperatures and the old
log-probabilities.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import (
    ActorConfig,
    AnyAdvantage,
    DataConfig,
    DatasetConfig,
    EvaluationConfig,
    OnPolicyConfig,
    RoleConfig,
    RunConfig,
    load,
    to_yaml,
)
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from recipes.sft.config import SFTConfig
from tests.configs import grpo_settings, ppo_settings
from tests.errors import missing_facts, rejects

KL_LOSS = {"kl_loss_coef": 0.1}
KL_PENALTY = {"estimator": "gae", "kl_coef": 0.1}


def ppo(actor: dict[str, Any] | None = None, **changes: Any) -> PPOConfig:
    """Returns a config without a reference of its own, unless `changes` has one."""
    settings: dict[str, Any] = ppo_settings() | {"reference": None} | changes
    settings["actor"] = settings["actor"] | (actor or {})
    return PPOConfig.model_validate(settings)


class JudgeConfig(RoleConfig):
    """Settings of a user's role."""

    limit: float = 0.5


class JudgedConfig(RunConfig):
    """A recipe with roles of its own."""

    judge: JudgeConfig = JudgeConfig()
    second: JudgeConfig | None = None


def test_the_roles_are_the_fields_with_the_settings_of_a_role() -> None:
    settings: dict[str, Any] = {"output": "out", "steps": 1}
    assert JudgedConfig.model_validate(settings).roles == ("judge",)
    assert JudgedConfig.model_validate(settings | {"second": {"limit": 0.1}}).roles == ("judge", "second")
    assert JudgedConfig.possible_roles() == ("judge", "second")
    assert SFTConfig.possible_roles() == ("actor",)
    assert set(PPOConfig.possible_roles()) == {"actor", "critic", "environment", "reference", "reward", "rollout"}
    assert set(ppo().roles) == {"actor", "critic", "reward", "rollout"}
    assert set(ppo(KL_LOSS).roles) == set(PPOConfig.possible_roles()) - {"environment"}


@pytest.mark.parametrize("changes", [{"actor": KL_LOSS}, {"algorithm": KL_PENALTY}])
def test_a_null_reference_becomes_the_initial_model_of_the_actor_if_a_kl_term_uses_it(changes: dict[str, Any]) -> None:
    model, engine = {"path": "mine", "dtype": "bfloat16"}, {"max_tokens_per_microbatch": 77}
    actor = {"model": model, "engine": engine, "temperature": 0.6} | changes.pop("actor", {})
    reference = ppo(actor, **changes).reference
    assert reference is not None and reference.temperature == 0.6
    assert (reference.model.path, reference.model.dtype) == (Path("mine"), "bfloat16")
    assert reference.engine.max_tokens_per_microbatch == 77


def test_a_reference_that_a_kl_term_uses_is_kept() -> None:
    reference = ppo(KL_LOSS, reference={"model": {"path": "other"}, "temperature": 2.0}).reference
    assert reference is not None and (reference.model.path, reference.temperature) == (Path("other"), 2.0)


def test_a_reference_without_a_kl_term_is_dropped() -> None:
    config = ppo(reference={"model": {"path": "other"}})
    assert config.reference is None and "reference" not in config.roles


@pytest.mark.parametrize(
    ("actor", "algorithm"),
    [({"loss": {"kind": "mine:loss"}}, {"estimator": "gae"}), ({}, {"estimator": "mine:estimator"})],
)
def test_a_users_function_may_use_a_reference_that_is_set(actor: dict[str, Any], algorithm: dict[str, Any]) -> None:
    assert ppo(actor, algorithm=algorithm).reference is None
    kept = ppo(actor, algorithm=algorithm, reference={"model": {"path": "other"}}).reference
    assert kept is not None and kept.model.path == Path("other")


class AlwaysKl(OnPolicyConfig):
    """A recipe that always uses the reference."""

    @classmethod
    def uses_reference(cls, actor: ActorConfig, algorithm: AnyAdvantage) -> bool | None:
        return True


def test_a_recipe_decides_whether_it_uses_the_reference() -> None:
    settings = grpo_settings() | {"reference": None}
    reference = AlwaysKl.model_validate(settings).reference
    assert reference is not None and reference.model.path == Path("model")
    assert GRPOConfig.model_validate(settings).reference is None


def test_the_temperature_of_every_policy_is_that_of_the_rollout() -> None:
    rollout = {"max_response_tokens": 8, "temperature": 0.7}
    config = ppo(KL_LOSS, rollout=rollout)
    assert config.reference is not None
    assert config.actor.temperature == config.reference.temperature == 0.7
    config = ppo(KL_LOSS, rollout=rollout, reference={"model": {"path": "other"}})
    assert config.reference is not None and config.reference.temperature == 0.7
    own = ppo(KL_LOSS | {"temperature": 1.5}, rollout=rollout)
    assert own.reference is not None and own.actor.temperature == own.reference.temperature == 1.5


def test_derived_settings_are_written_and_read_without_a_change(tmp_path: Path) -> None:
    config = ppo(KL_LOSS, rollout={"max_response_tokens": 8, "temperature": 0.7})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load(tmp_path / "config.yaml", [], PPOConfig)
    assert again.reference == config.reference and again.actor == config.actor and again.roles == config.roles


def test_evaluation_files_have_names() -> None:
    data = {"train": "a", "max_prompt_tokens": 8}
    named = DataConfig.model_validate(data | {"test": "b", "tests": {"hard": "c", "easy": "d"}})
    assert named.evaluation_files == {"": Path("b"), "hard": Path("c"), "easy": Path("d")}
    assert named.files("data") == {
        "data.train": Path("a"),
        "data.test": Path("b"),
        "data.tests.hard": Path("c"),
        "data.tests.easy": Path("d"),
    }
    only = DataConfig.model_validate(data | {"tests": {"hard": "c"}, "evaluation_rows": 3})
    assert only == DataConfig.model_validate(data | {"tests": {"hard": {"files": "c"}}, "evaluation_rows": 3})
    assert only.evaluation_files == {"hard": Path("c")}
    config = ppo(data=data | {"tests": {"hard": "c"}}, evaluate_every=2)
    assert config.evaluate_every == 2


def test_an_evaluation_set_has_settings_of_its_own() -> None:
    own = {"samples": 4, "temperature": 0.5}
    tests = {"hard": {"files": "c", "every": 5, "rows": 2, "evaluation": own}, "never": {"files": ["d"], "every": 0}}
    data = {"train": "a", "test": "b", "tests": tests | {"easy": "e"}, "max_prompt_tokens": 8, "evaluation_rows": 3}
    config = ppo(data=data, evaluate_every=2)
    names = ("", "hard", "never", "easy", "unknown")
    assert [config.evaluation_interval(name) for name in names] == [2, 5, 0, 2, 2]
    assert [config.data.num_evaluation_rows(name) for name in names[:4]] == [3, 2, 3, 3]
    own_settings = EvaluationConfig.model_validate(own)
    assert config.evaluation_by_set == dict.fromkeys(["", "never", "easy"], config.evaluation) | {"hard": own_settings}
    assert config.data.files("data")["data.tests.hard"] == Path("c")


def test_a_set_with_samples_needs_a_recipe_that_generates() -> None:
    data = {"train": "a", "tests": {"hard": {"files": "c", "evaluation": {"samples": 1}}}, "max_prompt_tokens": 8}
    assert ppo(data=data).data.tests["hard"].evaluation == EvaluationConfig()
    settings: dict[str, Any] = {"output": "o", "steps": 1, "batch_size": 1, "data": data}
    with rejects("data.tests.hard.evaluation", error=ValueError):
        DatasetConfig.model_validate(settings)


@pytest.mark.parametrize("name", ["", "a b", "a/b"])
def test_the_name_of_an_evaluation_file_can_be_part_of_a_metric(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate({"train": "a", "max_prompt_tokens": 8, "tests": {name: "c"}})
    assert not missing_facts(str(caught.value), "tests", "letters")


def test_several_equal_samples_are_rejected() -> None:
    assert EvaluationConfig().samples == 1 and EvaluationConfig(samples=4, temperature=0.5).samples == 4
    with pytest.raises(ValidationError) as caught:
        EvaluationConfig(samples=4)
    assert not missing_facts(str(caught.value), "samples", 4, "temperature", 0)


# Old log-probabilities.

ONE_UPDATE: dict[str, Any] = {"minibatch_size": 8}
CORRECTION = {"estimator": "gae", "correction": {"kind": "truncated"}}
TWO_POOLS = {"pools": {"a": [1], "b": [1]}, "roles": {"actor": "a", "critic": "a", "reward": "a", "rollout": "b"}}
ASYNC = {"kind": "async", "max_staleness": 1}


def old_logprobs(actor: dict[str, Any] | None = None, **changes: Any) -> str:
    return ppo(actor, **changes).actor.old_logprobs


@pytest.mark.parametrize("actor", [{}, {"loss": "gspo"}, {"loss": "mine:loss"}, {"lora": {"rank": 2}}, KL_LOSS])
def test_old_logprobs_are_the_current_ones_if_only_the_loss_of_one_update_reads_them(actor: dict[str, Any]) -> None:
    assert old_logprobs(actor, **ONE_UPDATE) == "current"
    assert old_logprobs(actor, **ONE_UPDATE, ppo_epochs=2) != "current"
    assert old_logprobs(actor) != "current"


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": KL_PENALTY},
        {"actor": {"loss": "clip_cov"}},
        {"actor": {"loss": "kl_cov"}},
        {"ppo_epochs": 2},
        {"minibatch_size": 4},
        {"minibatch_size": 5},
    ],
)
def test_old_logprobs_come_from_an_hf_rollout_with_the_actors_weights(changes: dict[str, Any]) -> None:
    assert old_logprobs(**ONE_UPDATE | changes) == "rollout"


@pytest.mark.parametrize(
    "changes",
    [
        {"actor": {"lora": {"rank": 2}}},
        {"actor": {"temperature": 0.5}},
        {"actor": {"model": {"path": "model", "dtype": "bfloat16"}}},
        {"actor": {"model": {"path": "model", "dtype": "float64"}}},
        {"actor": {"engine": {"compute_dtype": "bfloat16"}}},
        {"actor": {"loss": "decoupled_ppo"}},
        {"algorithm": CORRECTION},
        {"algorithm": {"estimator": "gae", "correction": {"kind": "rejection", "low": 0.5, "high": 2.0}}},
        {"rollout": {"max_response_tokens": 8, "quantization": "int8"}},
        {"rollout": {"max_response_tokens": 8, "engine": "vllm"}, "placement": TWO_POOLS},
        {"placement": TWO_POOLS},
        {
            "placement": {"pools": {"a": [2]}, "roles": dict.fromkeys(PPOConfig.possible_roles(), "a")},
            "schedule": ASYNC,
        },
        {"placement": TWO_POOLS, "schedule": {"kind": "one_step_off"}},
        {"schedule": {"kind": "one_step_off"}, "algorithm": {"estimator": "gae", "correction": None}},
    ],
)
def test_old_logprobs_are_recomputed_if_the_rollout_can_differ(changes: dict[str, Any]) -> None:
    assert old_logprobs(**changes) == "recompute"


@pytest.mark.parametrize("changes", [{"algorithm": CORRECTION}, {"actor": {"loss": "decoupled_ppo"}}])
def test_old_logprobs_of_one_update_are_recomputed_if_they_are_compared_with_the_rollouts(
    changes: dict[str, Any],
) -> None:
    assert old_logprobs(**ONE_UPDATE | changes) == "recompute"


def test_the_optimal_token_baseline_and_a_users_estimator_get_old_logprobs() -> None:
    for estimator in ("optimal_token_baseline", "mine:estimator"):
        settings = grpo_settings(**ONE_UPDATE, algorithm={"estimator": estimator})
        assert OnPolicyConfig.model_validate(settings).actor.old_logprobs == "rollout"


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"actor": {"old_logprobs": "current"}}, ("current", 2, "recompute")),
        (ONE_UPDATE | {"ppo_epochs": 3, "actor": {"old_logprobs": "current"}}, ("current", 3, "recompute")),
        (
            ONE_UPDATE | {"algorithm": KL_PENALTY, "actor": {"old_logprobs": "current"}},
            ("current", "algorithm.kl_coef", "recompute"),
        ),
        (
            ONE_UPDATE | {"actor": {"old_logprobs": "current", "loss": "clip_cov"}},
            ("current", "actor.loss", "clip_cov", "recompute"),
        ),
        (
            {"actor": {"old_logprobs": "rollout"}, "algorithm": CORRECTION},
            ("rollout", "algorithm.correction", "recompute"),
        ),
        (
            {"actor": {"old_logprobs": "rollout", "loss": "decoupled_ppo"}},
            ("rollout", "actor.loss", "decoupled_ppo", "recompute"),
        ),
        (
            {"actor": {"old_logprobs": "rollout"}, "rollout": {"max_response_tokens": 8, "quantization": "int8"}},
            ("int8", "auto"),
        ),
        ({"actor": {"old_logprobs": "old"}}, ("old", "current", "rollout", "recompute")),
    ],
)
def test_wrong_old_logprobs_are_rejected(changes: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        ppo(**changes)
    assert not missing_facts(str(caught.value), "actor.old_logprobs", *facts)


def test_old_logprobs_of_another_policy_need_no_correction_if_the_user_asks_for_them() -> None:
    settings: dict[str, Any] = {"placement": TWO_POOLS, "schedule": {"kind": "one_step_off"}}
    assert ppo(**settings).algorithm.applied_correction is not None
    config = ppo({"old_logprobs": "rollout"}, **settings)
    assert config.actor.old_logprobs == "rollout" and config.algorithm.applied_correction is None
    assert old_logprobs({"old_logprobs": "recompute"}, **ONE_UPDATE) == "recompute"


def test_chosen_old_logprobs_are_written(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(ppo(**ONE_UPDATE)))
    assert load(tmp_path / "config.yaml", [], PPOConfig).actor.old_logprobs == "current"
    assert "old_logprobs: current" in (tmp_path / "config.yaml").read_text()
