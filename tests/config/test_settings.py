"""Contradictory settings are rejected before the run starts, with a fix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import (
    ActorConfig,
    AdvantageConfig,
    CheckpointConfig,
    Config,
    CriticConfig,
    DataConfig,
    DataFile,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JudgeConfig,
    LoraConfig,
    OptimizerConfig,
    Placement,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    RolloutLogConfig,
    RolloutRunConfig,
    RunConfig,
    TrainedConfig,
)
from flowrl.config.setting_tree import find_disabled_settings, meaning_of, setting_paths
from flowrl.config.source import dotted
from recipes.distillation.config import DistillationConfig
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from recipes.sft.config import SFTConfig
from tests.configs import grpo_settings, on_policy_settings, ppo_settings
from tests.errors import missing_facts

MODEL = {"path": "model"}
TRAINED = {"model": MODEL, "optimizer": {"lr": 1e-4}}
ON_POLICY, PPO, GRPO = on_policy_settings(), ppo_settings(), grpo_settings()


def corrected(kind: str, **settings: float) -> dict[str, Any]:
    """The decoupled loss on rollouts that are corrected too."""
    algorithm = {"estimator": "gae", "correction": {"kind": kind} | settings}
    return ON_POLICY | {"critic": TRAINED, "algorithm": algorithm, "actor": TRAINED | {"loss": "decoupled_ppo"}}


def quantized(quantization: str = "int8", **correction: Any) -> dict[str, Any]:
    """PPO whose rollout is quantized, with a correction or none."""
    engine = "hf" if quantization == "int8" else "vllm"
    rollout: dict[str, Any] = {"max_response_tokens": 8, "quantization": quantization, "engine": engine}
    rollout |= {} if engine == "hf" else {"vllm": {"dtype": "float32"}}
    return PPO | {"rollout": rollout, "algorithm": {"estimator": "gae", "correction": correction or None}}


@pytest.mark.parametrize(
    ("cls", "settings", "facts"),
    [
        (OptimizerConfig, {"lr": 1.0, "total_steps": 5, "warmup_steps": 5}, ("warmup_steps", "total_steps", 5)),
        (OptimizerConfig, {"lr": 1.0, "betas": [0.9, 1.0]}, ("betas", 0.9, "1.0")),
        (OptimizerConfig, {"lr": float("nan")}, ("lr", "finite")),
        (RewardConfig, {"function": "rewards:score", "head": "fresh"}, ("head", "fresh", "model")),
        (
            ActorConfig,
            TRAINED | {"aggregation": "seq_mean_token_sum_norm"},
            ("seq_mean_token_sum_norm", "aggregation_scale"),
        ),
        (ActorConfig, TRAINED | {"aggregation_scale": 8.0}, ("aggregation", "aggregation_scale")),
        (RolloutLogConfig, {"every": -1}, ("every", 0)),
        (RolloutLogConfig, {"rows": 0}, ("rows", 0)),
        (RolloutLogConfig, {"max_mb": 0.0}, ("max_mb", 0)),
        (LoraConfig, {"rank": 0}, ("rank", 0)),
        (LoraConfig, {"rank": 8, "alpha": 0.0}, ("alpha", 0)),
        (LoraConfig, {"rank": 8, "dropout": 0.1}, ("dropout",)),
        (LoraConfig, {"rank": 8, "targets": ["q_proj", "q_proj"]}, ("targets", "q_proj")),
        (LoraConfig, {"rank": 8, "targets": [""]}, ("targets", "all_linear")),
        (LoraConfig, {"rank": 8, "targets": []}, ("targets.tuple", 1)),
        (LoraConfig, {"rank": 8, "targets": "q_proj"}, ("all_linear",)),
        (RewardConfig, {}, ("function", "model", "judge", "service", "components")),
        (RewardConfig, {"function": "rewards:score", "model": MODEL}, ("function", "model")),
        (RewardConfig, {"function": "rewards.score"}, ("function", "module", "name")),
        (RolloutConfig, {"max_response_tokens": 8, "temperature": 0.0}, ("temperature", 0)),
        (
            RolloutConfig,
            {"max_response_tokens": 8, "engine": "vllm", "temperature": 0.001},
            ("temperature", 0.001, 0.01),
        ),
        (
            RolloutConfig,
            {"max_response_tokens": 8, "transfer": {"via": "nccl"}},
            ("transfer.via", "nccl"),
        ),
        (RolloutConfig, {"max_response_tokens": 8, "stop_ids": [[1], []]}, ("stop_ids",)),
        (DataConfig, {"train": "a", "max_prompt_tokens": 8, "evaluation_rows": 3}, ("evaluation_rows", 3, "test")),
        (PPOConfig, PPO | {"batch_size": 9}, ("batch_size", 9, "samples_per_prompt", 8, 10)),
        (PPOConfig, PPO | {"minibatch_size": 9}, ("minibatch_size", 9, "batch_size", 8)),
        (PPOConfig, PPO | {"rollout": {"max_response_tokens": 8, "top_p": 0.9}}, ("top_p", 0.9, "1.0")),
        (PPOConfig, PPO | {"rollout": {"max_response_tokens": 8, "top_k": 5}}, ("rollout.top_k", 5, 0)),
        (PPOConfig, PPO | {"algorithm": {"estimator": "grpo"}}, ("algorithm.estimator", "grpo", "gae")),
        (PPOConfig, PPO | {"evaluate_every": 2}, ("evaluate_every", 2, "data.test")),
        (PPOConfig, PPO | {"backend": "inline", "address": "auto"}, ("address", "auto", "backend", "ray")),
        (GRPOConfig, GRPO | {"algorithm": {"estimator": "gae"}}, ("algorithm.estimator", "gae", "grpo")),
        (GRPOConfig, GRPO | {"samples_per_prompt": 1}, ("samples_per_prompt", 1)),
        (
            EngineConfig,
            {"offload_activations": True},
            ("offload_activations", "true", "gradient_checkpointing", "false"),
        ),
        (
            EngineConfig,
            {"strategy": "fsdp", "expert_parallel": True, "offload": "parameters"},
            ("offload", "parameters", "expert_parallel", "optimizer"),
        ),
        (EngineConfig, {"strategy": "ddp", "expert_parallel": True}, ("expert_parallel", "ddp", "fsdp")),
        (
            RolloutConfig,
            {"max_response_tokens": 8, "engine": "vllm", "router_replay": True},
            ("router_replay", "true", "vllm", "hf"),
        ),
        (
            EngineConfig,
            {"strategy": "fsdp", "overlap_all_reduce": True},
            ("overlap_all_reduce", "true", "strategy", "fsdp", "ddp"),
        ),
        (
            RolloutConfig,
            {"max_response_tokens": 8, "quantization": "fp8"},
            ("quantization", "fp8", "hf", "vllm"),
        ),
        (PPOConfig, quantized(), ("rollout.quantization", "int8", "algorithm.correction", "null")),
        (
            PPOConfig,
            quantized(kind="rejection", high=0.5),
            ("rollout.quantization", "int8", "algorithm.correction", "rejection"),
        ),
        (
            PPOConfig,
            quantized("fp8", kind="masked"),
            ("rollout.quantization", "fp8", "rollout.vllm.dtype", "bfloat16"),
        ),
        (
            PPOConfig,
            PPO
            | {
                "actor": TRAINED | {"model": {"path": "model", "dtype": "float64"}},
                "rollout": {"engine": "vllm", "max_response_tokens": 8},
            },
            ("actor.model.dtype", "float64", "rollout.vllm.dtype", "float32"),
        ),
        (PPOConfig, corrected("truncated"), ("algorithm.correction.kind", "truncated", "decoupled_ppo")),
        (PPOConfig, corrected("masked"), ("algorithm.correction.kind", "masked", "actor.loss", "ppo")),
    ],
)
def test_a_contradiction_is_rejected_with_a_fix(
    cls: type[Config], settings: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(settings)
    errors = caught.value.errors(include_input=False)
    message = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)
    assert not missing_facts(message, *facts), message


DATA = {"train": "train.jsonl", "max_prompt_tokens": 8}
PART = {"name": "pref", "model": MODEL}
DISTILLATION = {
    "output": "out", "steps": 1, "batch_size": 8, "minibatch_size": 4, "data": DATA, "actor": TRAINED,
    "rollout": {"max_response_tokens": 8}, "teacher": {"model": MODEL},
}  # fmt: skip


class UnscoredConfig(RolloutRunConfig):
    """A recipe of a user that needs no reward."""

    actor: TrainedConfig


UNSCORED = {name: value for name, value in DISTILLATION.items() if name != "teacher"}
SERVICE = {"service": {"url": "http://127.0.0.1:8000/score"}}


@pytest.mark.parametrize(
    ("cls", "settings", "facts"),
    [
        (RewardConfig, {"function": "m:f", "engine": {"compile": True}}, ("engine", "model")),
        (RewardConfig, {"function": "m:f", "policy_tokenizer": "folder"}, ("policy_tokenizer", "folder", "model")),
        (RewardConfig, {"function": "m:f", "policy_template": "file"}, ("policy_template", "file", "model")),
        (RewardConfig, {"function": "m:f", "head_seed": 3}, ("head_seed", 3, "model")),
        (RewardConfig, SERVICE | {"options": {"a": 1}}, ("options", "function")),
        (RewardConfig, {"model": MODEL, "rows_per_call": 4}, ("rows_per_call", 4, "function")),
        (PPOConfig, PPO | {"reward": {"model": MODEL, "workers": 4}}, ("reward.workers", 4, "function")),
        (PPOConfig, PPO | {"reward": {"model": MODEL, "timeout_s": 5.0}}, ("reward.timeout_s", "5.0", "function")),
        (PPOConfig, PPO | {"reward": SERVICE | {"network": True}}, ("reward.network", "true", "function")),
        (PPOConfig, PPO | {"reward": SERVICE | {"memory_mb": 100.0}}, ("reward.memory_mb", "100.0", "function")),
        (DataConfig, DATA | {"difficulty": {"candidates": 4}}, ("difficulty.candidates", 4, "curriculum")),
        (DataConfig, DATA | {"difficulty": {"revisit": 0.5}}, ("difficulty.revisit", 0.5, "difficulty.min")),
        (DataConfig, DATA | {"difficulty": {"column": "rate"}}, ("difficulty.column", "rate", "curriculum")),
        (DataFile, {"path": "a.jsonl", "seed": 3}, ("seed", 3, "reasoning_gym")),
        (JudgeConfig, {"model": MODEL, "max_comparisons": 2}, ("max_comparisons", 2, "pairwise")),
        (CheckpointConfig, {"keep_best": 1}, ("keep_best", 1, "every")),
        (RewardConfig, {"function": "m:f", "evaluation": [PART]}, ("evaluation.0.model", "components")),
        (DistillationConfig, DISTILLATION | {"environment": {"name": "m:E"}}, ("environment", "recipe")),
        (DistillationConfig, DISTILLATION | {"dynamic_sampling": {"max_rounds": 2}}, ("dynamic_sampling", "student")),
        (DistillationConfig, DISTILLATION | {"data": DATA | {"order": "curriculum"}}, ("data.order", "shuffle")),
        (UnscoredConfig, UNSCORED | {"dynamic_sampling": {}, "samples_per_prompt": 2}, ("dynamic_sampling", "reward")),
    ],
)
def test_a_setting_that_can_never_act_is_rejected(
    cls: type[Config], settings: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(settings)
    assert not missing_facts(str(caught.value), *facts), str(caught.value)


def test_the_processes_of_a_reward_model_run_may_extract_answers() -> None:
    evaluation = {"samples": 2, "temperature": 1.0, "extract_answer": "m:f"}
    settings = PPO | {"reward": {"model": MODEL, "workers": 4}, "evaluation": evaluation}
    assert PPOConfig.model_validate(settings | {"data": DATA | {"test": "test.jsonl"}}).reward is not None


@pytest.mark.parametrize(
    ("cls", "settings", "changes", "disabled"),
    [
        (CheckpointConfig, {"keep_last": 5}, {"every": 1}, "keep_last"),
        (CheckpointConfig, {"keep_last": None}, {"every": 1}, "keep_last"),
        (CheckpointConfig, {"asynchronous": False}, {"every": 1}, "asynchronous"),
        (RolloutLogConfig, {"every": 0, "rows": "all"}, {"every": 5}, "rows"),
        (RolloutLogConfig, {"every": 0, "token_rows": 2}, {"every": 5}, "token_rows"),
        (ActorConfig, TRAINED | {"kl_loss_kind": "k2"}, {"kl_loss_coef": 0.1}, "kl_loss_kind"),
        (ActorConfig, TRAINED | {"kl_loss_gradient": "k2"}, {"kl_loss_coef": 0.1}, "kl_loss_gradient"),
        (ActorConfig, TRAINED | {"kl_loss_unbiased": True}, {"kl_loss_coef": 0.1}, "kl_loss_unbiased"),
        (AdvantageConfig.members()["gae"], {"kl_kind": "k2"}, {"kl_coef": 0.1}, "kl_kind"),
        (CriticConfig, TRAINED | {"head_seed": 3}, {"head": "fresh"}, "head_seed"),
        (RewardModelConfig, TRAINED | {"head": "from_model", "head_seed": 3}, {"head": "fresh"}, "head_seed"),
        (RewardConfig, {"model": MODEL, "head_seed": 3}, {"head": "fresh"}, "head_seed"),
        (RewardConfig, {"function": "m:f", "max_failure_rate": 0.5}, {"on_failure": "drop"}, "max_failure_rate"),
        (EnvironmentConfig, {"name": "m:E", "max_failure_rate": 0.5}, {"on_failure": "drop"}, "max_failure_rate"),
        (EvaluationConfig, {"extract_answer": "m:f"}, {"samples": 2, "temperature": 1.0}, "extract_answer"),
        (
            JudgeConfig,
            {"model": MODEL, "kind": "pairwise", "compare_with": "answer", "max_comparisons": 2},
            {"compare_with": None},
            "max_comparisons",
        ),
    ],
)
def test_a_setting_that_another_one_disables_is_accepted_and_found(
    cls: type[Config], settings: dict[str, Any], changes: dict[str, Any], disabled: str
) -> None:
    messages = [message for _, message in find_disabled_settings(cls.model_validate(settings))]
    assert [message.partition(" is ")[0] for message in messages] == [disabled]
    assert not list(find_disabled_settings(cls.model_validate(settings | changes)))


def test_disabled_settings_are_found_in_groups_lists_and_mappings() -> None:
    held_out = {"files": "test.jsonl", "evaluation": {"extract_answer": "m:f"}}
    part = {"name": "pref", "model": MODEL, "head_seed": 3}
    config = GRPOConfig.model_validate(
        GRPO | {"reward": [part], "data": DATA | {"tests": {"hard": held_out}}, "checkpoint": {"keep_last": 5}}
    )
    assert {dotted(key) for key, _ in find_disabled_settings(config)} == {
        "checkpoint",
        "reward.components.0",
        "data.tests.hard.evaluation",
    }


def test_every_dependency_names_a_setting_of_its_class_or_of_a_subclass() -> None:
    for cls in [cls for cls in config_classes() if "DEPENDENCIES" in vars(cls)]:
        known = {path for each in (cls, *subclasses_of(cls)) for path in setting_paths(each)}
        named = {setting for dependency in vars(cls)["DEPENDENCIES"] for setting in dependency.settings}
        assert named <= known, cls


LINEAR: dict[str, Any] = {"lr": 1e-4, "schedule": "linear"}
SFT: dict[str, Any] = {
    "output": "out", "actor": {"model": MODEL, "optimizer": LINEAR}, "batch_size": 2, "steps": 7,
    "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
}  # fmt: skip


def sft(optimizer: dict[str, Any]) -> SFTConfig:
    return SFTConfig.model_validate(SFT | {"actor": {"model": MODEL, "optimizer": optimizer}})


def test_the_schedule_ends_at_the_last_update_of_every_role() -> None:
    sizes = {"steps": 10, "batch_size": 8, "minibatch_size": 4, "ppo_epochs": 3}
    trained = {"actor": {"model": MODEL, "optimizer": LINEAR}, "critic": {"model": MODEL, "optimizer": LINEAR}}
    config = PPOConfig.model_validate(PPO | trained | sizes)
    assert config.actor.optimizer.total_steps == config.critic.optimizer.total_steps == config.num_updates == 60
    assert SFTConfig.model_validate(SFT).actor.optimizer.total_steps == 7


def test_a_smaller_last_minibatch_is_an_update() -> None:
    sizes = {"steps": 2, "batch_size": 256, "minibatch_size": 100, "samples_per_prompt": 1}
    assert PPOConfig.model_validate(PPO | sizes).num_updates == 6


def test_an_explicit_end_of_the_schedule_is_kept() -> None:
    assert sft(LINEAR | {"total_steps": 3}).actor.optimizer.total_steps == 3


def test_a_run_that_ends_during_the_warmup_has_a_valid_schedule() -> None:
    config = sft(LINEAR | {"warmup_steps": 20})
    assert SFTConfig.model_validate(config.model_dump()) == config


def test_a_constant_schedule_has_no_end() -> None:
    assert sft({"lr": 1e-4}).actor.optimizer.total_steps is None


class OwnRun(RunConfig):
    """A recipe that does not define its number of updates."""

    actor: ActorConfig


class LateSizes(RunConfig):
    """A recipe whose number of updates depends on a setting after the trained role."""

    actor: ActorConfig
    passes: int = 2

    @classmethod
    def count_updates(cls, settings: Mapping[str, Any]) -> int:
        return settings["steps"] * settings["passes"]


def test_a_size_after_the_trained_role_does_not_leave_the_schedule_without_an_end() -> None:
    settings = {"output": "out", "steps": 3}
    with pytest.raises(ValidationError) as caught:
        LateSizes.model_validate(settings | {"actor": {"model": MODEL, "optimizer": LINEAR}})
    assert not missing_facts(str(caught.value), "optimizer.total_steps", "LateSizes", "passes", "actor")
    config = LateSizes.model_validate(settings | {"actor": {"model": MODEL, "optimizer": LINEAR | {"total_steps": 6}}})
    assert config.actor.optimizer.total_steps == 6


def test_a_schedule_without_a_known_end_is_rejected() -> None:
    settings = {"output": "out", "steps": 3, "actor": {"model": MODEL, "optimizer": LINEAR}}
    with pytest.raises(ValidationError) as caught:
        OwnRun.model_validate(settings)
    assert not missing_facts(str(caught.value), "actor", "linear", "optimizer.total_steps", "OwnRun")


def test_the_decoupled_loss_can_be_combined_with_rejection() -> None:
    assert PPOConfig.model_validate(corrected("rejection", high=0.5)).actor.loss.kind == "decoupled_ppo"


def test_a_quantized_rollout_requires_importance_weights():
    for correction in ({"kind": "truncated"}, {"kind": "masked"}, {"kind": "mine:weights"}):
        assert PPOConfig.model_validate(quantized(**correction)).rollout.quantization == "int8"
    decoupled = {"actor": TRAINED | {"loss": "decoupled_ppo"}}
    assert PPOConfig.model_validate(quantized() | decoupled).algorithm.correction is None
    half = {"engine": "vllm", "vllm": {"dtype": "bfloat16"}, "max_response_tokens": 8, "quantization": "fp8"}
    assert PPOConfig.model_validate(quantized(kind="truncated") | {"rollout": half}).dedicated_roles() == ("rollout",)


@pytest.mark.parametrize(("cls", "settings"), [(PPOConfig, PPO), (GRPOConfig, GRPO)])
def test_a_step_reads_rows_over_samples_prompts(cls: type[PPOConfig], settings: dict[str, Any]) -> None:
    assert cls.model_validate(settings).prompts_per_step == 4


def test_a_config_cannot_be_written() -> None:
    config = OptimizerConfig(lr=1.0)
    with pytest.raises(ValidationError, match="frozen"):
        config.lr = 2.0  # pyright: ignore[reportAttributeAccessIssue] (what is tested)


def test_a_placement_reads_the_same_from_python_and_from_yaml_values() -> None:
    ours = Placement(pools={"main": [2]}, roles={"actor": "main"})
    assert ours == Placement.model_validate({"pools": {"main": [2]}, "roles": {"actor": {"pool": "main", "tp": 1}}})


@pytest.mark.parametrize("pool", [2, "half", "1/0", "0/2", [True], [-1], [1.5], None, {}])
def test_an_invalid_pool_is_rejected(pool: object) -> None:
    with pytest.raises(ValidationError, match="pool"):
        Placement.model_validate({"pools": {"main": pool}, "roles": {"actor": "main"}})


@pytest.mark.parametrize("role", [None, 3, ["main"]])
def test_an_invalid_role_is_rejected(role: object) -> None:
    with pytest.raises(ValidationError, match="role"):
        Placement.model_validate({"pools": {"main": [1]}, "roles": {"actor": role}})


def subclasses_of(cls: type[Config]) -> list[type[Config]]:
    return [subclass for child in cls.__subclasses__() for subclass in (child, *subclasses_of(child))]


def config_classes() -> list[type[Config]]:
    return subclasses_of(Config)


def test_every_setting_is_explained() -> None:
    assert SFTConfig in config_classes()
    shipped = [cls for cls in config_classes() if cls.__module__.startswith(("flowrl.", "recipes."))]
    assert not [f"{c.__name__}.{n}" for c in shipped for n, field in c.model_fields.items() if not meaning_of(field)]


def test_a_placement_file_has_at_most_fifteen_lines() -> None:
    files = list((Path(__file__).parents[2] / "placement").glob("*.yaml"))
    assert len(files) >= 4 and all(len(file.read_text().splitlines()) <= 15 for file in files)


JUDGE, SCORER = {"judge": {"model": {"path": "j"}}}, {"model": {"path": "m"}}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (JUDGE, {"reward": "reward.judge"}),
        (SCORER, {"reward": "reward"}),
        (
            [{"name": "exact", "function": "m:f"}, {"name": "graded", **JUDGE}, {"name": "scored", **SCORER}],
            {
                "reward": "reward",
                "reward_graded": "reward.components.1.judge",
                "reward_scored": "reward.components.2",
            },
        ),
    ],
)
def test_each_role_of_a_reward_has_the_key_of_its_settings(settings: Any, keys: dict[str, str]) -> None:
    reward = RewardConfig.model_validate(settings)
    assert reward.role_keys("reward") == keys and keys.keys() == reward.roles("reward").keys()
