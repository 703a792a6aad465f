"""Models and data files that do not fit the settings are rejected."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from flowrl.config import ConfigError, EngineConfig, ModelConfig
from flowrl.run.checks.file_checks import (
    check_experts,
    check_paths,
    check_positions,
    check_vocabularies,
)
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from tests.configs import grpo_settings, ppo_settings
from tests.errors import rejects
from tests.recipes.rollout_configs import rejection_config
from tests.run.checks.test_placement_checks import ActorRun, on, run_with

MIXTRAL: dict[str, object] = {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64,
    "num_hidden_layers": 2, "router_aux_loss_coef": 0.02,
}  # fmt: skip


def with_model(folder: Path, settings: dict[str, object], **actor: object) -> ActorRun:
    (folder / "config.json").write_text(json.dumps(settings))
    config = run_with(on(1))
    return config.model_copy(
        update={"actor": config.actor.model_copy(update={"model": ModelConfig(path=folder), **actor})}
    )


@pytest.mark.parametrize("coef", [None, 0.0, 0.1])
def test_the_auxiliary_loss_of_experts_may_have_any_coefficient(coef: float | None, tmp_path: Path) -> None:
    check_experts(with_model(tmp_path, MIXTRAL, router_loss_coef=coef))


@pytest.mark.parametrize(
    ("settings", "coef", "facts"),
    [
        (MIXTRAL | {"router_aux_loss_coef": None}, None, ["null", "0.001"]),
        (MIXTRAL | {"model_type": "olmoe"}, None, ["olmoe", "mixtral", "0"]),
        (MIXTRAL | {"model_type": "olmoe"}, 0.1, ["olmoe", "0.1"]),
        ({"model_type": "qwen2"}, 0.1, ["0.1", "remove"]),
    ],
)
def test_an_undefined_auxiliary_loss_is_rejected(
    settings: dict[str, object], coef: float | None, facts: list[str], tmp_path: Path
) -> None:
    with rejects("actor.router_loss_coef", tmp_path, *facts, error=ConfigError):
        check_experts(with_model(tmp_path, settings, router_loss_coef=coef))


def test_an_unknown_family_is_trained_with_an_explicit_0(tmp_path: Path) -> None:
    check_experts(with_model(tmp_path, MIXTRAL | {"model_type": "olmoe"}, router_loss_coef=0.0))


def test_the_experts_of_a_user_defined_engine_are_not_checked(tmp_path: Path) -> None:
    engine = EngineConfig(kind="tests.engines.train.user_engine:PipelineEngine")
    check_experts(with_model(tmp_path, MIXTRAL | {"model_type": "olmoe"}, engine=engine))


@pytest.mark.parametrize(
    ("settings", "engine", "facts"),
    [
        (MIXTRAL, {}, []),
        ({"model_type": "qwen2"}, {}, ["actor.model.path", "mixtral"]),
        (MIXTRAL, {"kind": "tests.engines.train.user_engine:PipelineEngine"}, ["actor.engine.kind"]),
    ],
)
def test_routes_are_replayed_only_by_policies_with_routers(
    settings: dict[str, object], engine: dict[str, str], facts: list[str], tmp_path: Path
) -> None:
    """The actor of rejection sampling is no `ActorConfig`."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = rejection_config(tmp_path, tmp_path / "run", actor={"model": {"path": tmp_path}})
    actor = config.actor.model_copy(update={"engine": EngineConfig.model_validate(engine)})
    rollout = config.rollout.model_copy(update={"router_replay": True})
    config = config.model_copy(update={"actor": actor, "rollout": rollout})
    with rejects("rollout.router_replay", *facts, error=ConfigError) if facts else nullcontext():
        check_experts(config)


def test_compiled_experts_are_rejected(tmp_path: Path) -> None:
    with rejects("actor.engine.compile", tmp_path, error=ConfigError):
        check_experts(with_model(tmp_path, MIXTRAL, engine=EngineConfig(compile=True)))


def test_only_the_actor_must_support_the_length_of_the_ptx_text(tmp_path: Path) -> None:
    for name, limit in (("small", 32), ("large", 64)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"model_type": "qwen2", "max_position_embeddings": limit})
        )
    ptx = {"data": tmp_path / "text.jsonl", "batch_size": 4, "max_tokens": 48, "coef": 1.0}

    def config(actor: str, critic: str) -> PPOConfig:
        settings = ppo_settings(model=tmp_path / actor, ptx=ptx)
        critic_model = {"path": tmp_path / critic, "dtype": "float32"}
        return PPOConfig.model_validate(settings | {"critic": settings["critic"] | {"model": critic_model}})

    check_positions(config("large", "small"))
    with rejects("ptx.max_tokens", 48, tmp_path / "small", 32, error=ConfigError):
        check_positions(config("small", "large"))


def save_vocabulary(folder: Path, num_embeddings: int, num_ids: int, num_added: int = 0) -> Path:
    """Writes the sizes of a model and its tokenizer, whose last ids are added tokens."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": num_embeddings}))
    vocabulary = {f"t{i}": i for i in range(num_ids - num_added)}
    added = [{"id": i, "content": f"<{i}>"} for i in range(num_ids - num_added, num_ids)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return folder


def with_critic(actor: Path, critic: Path) -> PPOConfig:
    settings = ppo_settings(model=actor)
    return PPOConfig.model_validate(settings | {"critic": settings["critic"] | {"model": {"path": critic}}})


def with_tokenizer(model: Path, tokenizer: Path | None) -> ActorRun:
    run = run_with(on(1))
    settings = run.actor.model_dump() | {"model": {"path": model, "tokenizer": tokenizer}}
    return ActorRun.model_validate(run.model_dump() | {"actor": settings})


def test_a_role_with_fewer_embeddings_than_the_tokenizer_of_the_actor_has_ids_is_rejected(tmp_path: Path) -> None:
    actor = save_vocabulary(tmp_path / "actor", 24, 20)
    fitting = save_vocabulary(tmp_path / "fitting", 20, 5)
    small = save_vocabulary(tmp_path / "small", 19, 19)
    check_vocabularies(with_critic(actor, fitting))
    with rejects("critic.model.path", small, 19, "actor.model.path", actor, 20, error=ConfigError):
        check_vocabularies(with_critic(actor, small))


def test_a_role_needs_embeddings_for_added_tokens_that_the_actor_can_sample(tmp_path: Path) -> None:
    actor = save_vocabulary(tmp_path / "actor", 18, 20, num_added=4)
    same = save_vocabulary(tmp_path / "same", 18, 18)
    small = save_vocabulary(tmp_path / "small", 17, 17)
    check_vocabularies(with_critic(actor, same))
    with rejects("critic.model.path", small, 17, "actor.model.path", actor, 18, error=ConfigError):
        check_vocabularies(with_critic(actor, small))


def test_a_tokenizer_whose_vocabulary_is_larger_than_the_models_is_rejected(tmp_path: Path) -> None:
    model, larger = save_vocabulary(tmp_path / "model", 19, 19), save_vocabulary(tmp_path / "larger", 24, 20)
    check_vocabularies(with_tokenizer(model, None))
    with rejects("actor.model.path", model, 19, "actor.model.tokenizer", larger, 20, error=ConfigError):
        check_vocabularies(with_tokenizer(model, larger))


def test_added_tokens_beyond_the_embeddings_of_the_model_are_allowed(tmp_path: Path) -> None:
    check_vocabularies(with_tokenizer(save_vocabulary(tmp_path / "model", 19, 24, num_added=5), None))


def test_a_reward_model_needs_embeddings_for_the_ids_of_its_own_tokenizer_only(tmp_path: Path) -> None:
    actor, reward = save_vocabulary(tmp_path / "actor", 24, 20, 1), save_vocabulary(tmp_path / "reward", 10, 10)
    config = ppo_settings(model=actor, reward={"model": {"path": reward}})
    check_vocabularies(PPOConfig.model_validate(config))
    config["reward"]["model"]["tokenizer"] = actor
    with rejects("reward.model.path", 10, "reward.model.tokenizer", 20, error=ConfigError):
        check_vocabularies(PPOConfig.model_validate(config))


def test_all_missing_paths_are_reported_together_and_each_once(tmp_path: Path) -> None:
    missing, rows = tmp_path / "a/b/model", tmp_path / "none.jsonl"
    settings = grpo_settings(model=missing, data={"train": rows, "test": rows, "max_prompt_tokens": 8})
    settings["actor"]["kl_loss_coef"] = 0.1  # uses the reference
    with rejects(2, missing, rows, "actor.model.path", "reference.model.path", "data.train", "data.test") as caught:
        check_paths(GRPOConfig.model_validate(settings))
    assert len(str(caught.value).splitlines()) == 3
    with rejects("data.train") as caught:
        check_paths(GRPOConfig.model_validate(grpo_settings(model=tmp_path)))
    assert len(str(caught.value).splitlines()) == 1
