"""Distillation: losses and agreement with hand-computed values, schedules, resume, and invalid settings."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

from flowrl.algorithms.losses.distillation import MIN_REST
from flowrl.cli import run_recipe
from flowrl.config import UserError, to_yaml
from flowrl.run.advantages import measure_batch
from flowrl.run.datasets import read_prompts
from flowrl.run.loop import Run
from flowrl.workers import Actor, Rollout
from recipes.distillation.config import DistillationConfig
from recipes.distillation.train import train
from recipes.quickstart.prepare import CHARACTERS, CHAT_TEMPLATE, SPECIAL
from recipes.quickstart.task import exact, score
from tests.configs import with_float64_models
from tests.engines.closeness import FLOAT32_RTOL
from tests.errors import missing_facts, rejects
from tests.recipes.rollout_configs import (
    SCHEDULES,
    detached,
    distillation_config,
    first_responses,
    response_logits,
    save_teacher,
)
from tests.slow_cases import one_of

LOSSES: dict[str, Any] = {
    "sampled_reverse_kl": "sampled_reverse_kl",
    "topk_forward_kl": {"kind": "topk_forward_kl", "k": len(SPECIAL) + len(CHARACTERS)},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher") / "model")


def records(config: DistillationConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


def weights(config: DistillationConfig) -> dict[str, torch.Tensor]:
    return load_file(config.output / "model" / "model.safetensors")


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_are_those_of_both_models(task_folder: Path, tmp_path: Path, teacher: Path, loss: str) -> None:
    config = distillation_config(task_folder, tmp_path / "run", teacher, actor={"loss": LOSSES[loss]}, steps=1)
    train(config)
    initial, step = records(config)

    batch = first_responses(config)
    student_TV, teacher_TV = (
        response_logits(model, batch).log_softmax(-1) for model in (task_folder / "model", teacher)
    )
    if loss == "topk_forward_kl":
        expected = (teacher_TV.exp() * (teacher_TV - student_TV)).sum(-1).mean()
        assert step["actor/teacher_mass"] == pytest.approx(1.0)
    else:
        ids_T1 = batch.get("input_ids")[batch.get("response_mask")][:, None]
        expected = (student_TV - teacher_TV).gather(-1, ids_T1).mean()
        assert step["actor/weight"] == pytest.approx(1.0, abs=1e-5)
    assert step["actor/loss"] == pytest.approx(float(expected), rel=1e-4, abs=1e-6)

    greedy = first_responses(config, held_out=True)
    top_tokens = [response_logits(model, greedy).argmax(-1) for model in (task_folder / "model", teacher)]
    assert initial["agreement"] == pytest.approx(float((top_tokens[0] == top_tokens[1]).float().mean()))


PIPELINE = "tests.engines.train.user_engine:PipelineEngine"
"""An engine that computes log-probabilities and entropies only."""

REWARD = {"function": "recipes.quickstart.task:score", "evaluation": "recipes.quickstart.task:exact"}


def test_scores_measure_the_student_and_change_no_weight(task_folder: Path, tmp_path: Path, teacher: Path) -> None:
    config = distillation_config(task_folder, tmp_path / "scored", teacher, reward=REWARD, steps=2)
    unscored = distillation_config(task_folder, tmp_path / "unscored", teacher, steps=2)
    summary = train(config)
    train(unscored)
    initial, step, _ = records(config)

    batches = {score: first_responses(config, held_out=score is exact) for score in (score, exact)}
    means = {}
    for function, batch in batches.items():
        columns = (batch.get(name) for name in ("prompt", "response", "answer"))
        values = [function(prompt, response, answer) for prompt, response, answer in zip(*columns, strict=True)]
        means[function] = pytest.approx(sum(values) / len(values), rel=FLOAT32_RTOL)
    assert step["reward"] == step["rewards/reward"] == means[score] and step["reward_failed_fraction"] == 0
    assert initial["accuracy"] == summary["accuracy_before"] == means[exact]
    assert "accuracy" not in records(unscored)[0] and "reward" not in records(unscored)[1]
    assert all(torch.equal(weights(unscored)[name], weight) for name, weight in weights(config).items())
    assert initial["agreement"] == records(unscored)[0]["agreement"]


def test_too_many_failed_rewards_end_the_run(task_folder: Path, tmp_path: Path, teacher: Path) -> None:
    reward = {"function": "tests.recipes.scored:raises", "on_failure": "zero", "max_failure_rate": 0.5}
    changes: dict[str, Any] = {"reward": reward, "evaluate_every": 0}
    config = distillation_config(task_folder, tmp_path / "run", teacher, **changes)
    with rejects("reward.max_failure_rate", 0.5, "ZeroDivisionError", error=UserError):
        train(config)
    assert records(config)[-1]["reward_failed_fraction"] == 1


def test_a_failed_reward_ends_the_run_at_once_by_default(task_folder: Path, tmp_path: Path, teacher: Path) -> None:
    reward = {"function": "tests.recipes.scored:raises"}
    config = distillation_config(task_folder, tmp_path / "run", teacher, reward=reward, evaluate_every=0)
    with rejects("reward", "ZeroDivisionError", "tests.recipes.scored", error=UserError):
        train(config)


def test_scores_after_the_training_calls_of_a_step_are_not_measured(
    task_folder: Path, tmp_path: Path, teacher: Path
) -> None:
    config = distillation_config(task_folder, tmp_path / "run", teacher, reward=REWARD, steps=1)
    prompts, _ = read_prompts(config)
    with Run(config) as run:
        actor = run.group("actor", Actor, config.actor)
        reward = run.rewards()
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        for batch in run.rollouts(rollout, prompts, policy=actor):
            batch = batch.union(reward.score(batch))
            run.log(measure_batch(batch))
            assert not run.due(0)  # ends the part of the step that is measured
            best = batch.rows(batch.get("scores").argmax()[None].numpy()).drop(
                "scores", "reward_failed", "reward_calls"
            )
            highest = reward.score(best).get("scores").item()
            run.sync_weights(actor, rollout)
        run.finish()
        assert reward.score(best).get("scores").item() == highest
    (step,) = records(config)
    assert step["rewards/reward"] == step["reward"] < highest


def test_several_sets_and_failed_rewards_are_evaluated(task_folder: Path, tmp_path: Path, teacher: Path) -> None:
    reward = {"function": "tests.recipes.scored:fails_for_some_responses", "on_failure": "zero", "max_failure_rate": 1}
    file = task_folder / "test.jsonl"
    data = {"train": task_folder / "train.jsonl", "max_prompt_tokens": 16, "tests": {"a": {"files": file}}}
    changes: dict[str, Any] = {"reward": reward, "data": data, "evaluation": {"samples": 2, "temperature": 1.0}}
    config = distillation_config(task_folder, tmp_path / "run", teacher, steps=1, **changes)
    train(config)
    initial = records(config)[0]
    assert 0 < initial["evaluation/failed_fraction/a"] < 1
    assert initial["evaluation/failed_as_worst/a"] < initial["accuracy/a"] < initial["accuracy_best@2/a"]
    assert 0 < initial["agreement/a"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", one_of(*LOSSES))
def test_the_student_approaches_the_teacher(task_folder: Path, tmp_path: Path, teacher: Path, loss: str) -> None:
    changes: dict[str, Any] = {"actor": {"loss": LOSSES[loss]}, "batch_size": 64, "minibatch_size": 64, "steps": 15}
    config = distillation_config(task_folder, tmp_path / "run", teacher, **changes)
    summary = train(config)
    kl = [step["actor/kl_k3" if loss == "sampled_reverse_kl" else "actor/forward_kl"] for step in records(config)[1:]]
    assert kl[-1] < 0.7 * kl[0]
    assert summary["agreement_after"] > summary["agreement_before"]


def test_an_equal_teacher_has_no_loss_and_agrees_at_every_token(task_folder: Path, tmp_path: Path) -> None:
    config = distillation_config(task_folder, tmp_path / "run", task_folder / "model", steps=1)
    train(config)
    initial, step = records(config)
    assert abs(step["actor/loss"]) < 1e-5 and initial["agreement"] == 1.0


def with_unused_embeddings(model: Path, copy: Path, *, num_unused: int, scale: float) -> Path:
    """Returns a copy of a model with unused embeddings, whose logits are large if `scale` is."""
    shutil.copytree(model, copy)
    own = load_file(copy / "model.safetensors")
    (name,) = (name for name in own if "embed_tokens" in name)
    own[name] = torch.cat([own[name], torch.randn(num_unused, own[name].shape[1]) * scale])
    save_file(own, copy / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"vocab_size": len(own[name])}))
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("loss", one_of(*reversed(LOSSES)))
def test_teacher_and_student_may_have_different_unused_embeddings(
    task_folder: Path, tmp_path: Path, teacher: Path, loss: str
) -> None:
    """Unused embeddings of the teacher are likely, but no candidates. The student samples its unused embeddings."""
    torch.manual_seed(0)
    larger = with_unused_embeddings(teacher, tmp_path / "larger", num_unused=5, scale=1.0)
    changes: dict[str, Any] = {"actor": {"loss": LOSSES[loss]}, "steps": 1}
    config = distillation_config(task_folder, tmp_path / "teacher", larger, **changes)
    train(config)
    initial, step = records(config)
    batch = first_responses(config)
    student_TV = response_logits(task_folder / "model", batch).log_softmax(-1)
    teacher_TV = response_logits(larger, batch).log_softmax(-1)[:, : student_TV.shape[1]]
    if loss == "topk_forward_kl":
        assert step["actor/teacher_mass"] == pytest.approx(float(teacher_TV.exp().sum(-1).mean()), rel=1e-4)
        assert step["actor/teacher_mass"] < 0.9
        rest_T = 1 - teacher_TV.exp().sum(-1)  # the student has no other tokens
        expected_T = (teacher_TV.exp() * (teacher_TV - student_TV)).sum(-1) + rest_T * (rest_T / MIN_REST).log()
        assert step["actor/loss"] == pytest.approx(float(expected_T.mean()), rel=1e-4)
    greedy = first_responses(config, held_out=True)
    best = response_logits(larger, greedy)[:, : student_TV.shape[1]].argmax(-1)
    agrees = response_logits(task_folder / "model", greedy).argmax(-1) == best
    assert initial["agreement"] == pytest.approx(float(agrees.float().mean()))

    own = with_unused_embeddings(task_folder / "model", tmp_path / "own", num_unused=5, scale=0.05)
    actor = changes["actor"] | {"model": {"path": own}}
    config = distillation_config(task_folder, tmp_path / "student", teacher, **changes | {"actor": actor})
    assert (first_responses(config).get("input_ids") >= student_TV.shape[1]).any()
    train(config)
    assert math.isfinite(records(config)[1]["actor/loss"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "sync"])
def test_every_schedule_weights_stale_tokens(task_folder: Path, tmp_path: Path, teacher: Path, schedule: str) -> None:
    placement = detached("teacher", "reward")
    changes: dict[str, Any] = {"schedule": SCHEDULES[schedule], "placement": placement, "minibatch_size": 8}
    changes["reward"] = REWARD
    config = distillation_config(task_folder, tmp_path / "run", teacher, **changes)
    train(config)
    steps = records(config)[1:]
    assert all(math.isfinite(step["actor/loss"]) and "rewards/reward" in step for step in steps)
    assert abs(steps[-1]["actor/weight"] - 1) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("loss", one_of(*LOSSES))
def test_metrics_do_not_depend_on_micro_batches(task_folder: Path, tmp_path: Path, teacher: Path, loss: str) -> None:
    results = []
    for name, engine in (("one", {}), ("small", {"max_tokens_per_microbatch": 24, "packing": "never"})):
        actor = {"loss": LOSSES[loss], "engine": engine}
        config = with_float64_models(distillation_config(task_folder, tmp_path / name, teacher, actor=actor))
        train(config)
        results.append([step["actor/loss"] for step in records(config)[1:]])
    assert results[0] == pytest.approx(results[1], abs=1e-9)


@pytest.mark.slow
def test_an_interrupted_run_resumes_exactly(task_folder: Path, tmp_path: Path, teacher: Path) -> None:
    changes: dict[str, Any] = {"checkpoint": {"every": 1}, "minibatch_size": 6, "reward": REWARD}
    full = distillation_config(task_folder, tmp_path / "full", teacher, **changes)
    part = distillation_config(task_folder, tmp_path / "part", teacher, **changes | {"steps": 1})
    train(full)
    train(part)
    train(part.model_copy(update={"steps": 3, "resume": "auto"}))
    assert all(torch.equal(weights(part)[name], weight) for name, weight in weights(full).items())
    names = ("actor/loss", "reward", "rewards/reward", "reward_failed_fraction")
    first, second = ([[step[name] for name in names] for step in records(config)[1:]] for config in (full, part))
    assert first == second


def test_a_teacher_with_another_vocabulary_is_rejected_before_the_run_starts(
    task_folder: Path, tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *reversed(CHARACTERS)))}
    tokens = {"unk_token": SPECIAL[0], "pad_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=CHAT_TEMPLATE, **tokens).save_pretrained(other)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(distillation_config(task_folder, tmp_path / "run", other)))
    capsys.readouterr()
    assert run_recipe(DistillationConfig, train, [str(file)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert not missing_facts(printed, "teacher.model.path", other, task_folder / "model")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"rollout": {"max_response_tokens": 6, "top_k": 4}}, ("rollout.top_k", 4, "sampled_reverse_kl", 0)),
        ({"actor": {"temperature": 0.5}}, ("actor.temperature", 0.5, "rollout.temperature", 1)),
        ({"actor": {"loss": {"kind": "topk_forward_kl", "k": 0}}}, ("actor.loss.topk_forward_kl.k", 0)),
        ({"actor": {"loss": "reverse_kl"}}, ("sampled_reverse_kl", "topk_forward_kl")),
        ({"minibatch_size": 17}, ("minibatch_size", 17, 16)),
        ({"environment": {"name": "games:Game"}}, ("environment",)),
        ({"reward": REWARD, "dynamic_sampling": {}}, ("dynamic_sampling",)),
        ({"reward": {**REWARD, "on_failure": "drop"}}, ("reward.on_failure", "drop", "zero", "stop")),
        ({"actor": {"engine": {"kind": PIPELINE}}}, ("actor.engine.kind", "topk_ids", "fsdp")),
        (
            {"actor": {"engine": {"kind": PIPELINE}, "loss": LOSSES["topk_forward_kl"]}, "evaluate_every": 0},
            ("actor.engine.kind", "topk_logprobs", "fsdp"),
        ),
    ],
)
def test_invalid_settings_are_rejected(tmp_path: Path, changes: dict[str, Any], facts: tuple[str | float, ...]) -> None:
    with rejects(*facts, error=ValueError):
        distillation_config(tmp_path, tmp_path, tmp_path, **changes)


def test_the_forward_kl_accepts_truncated_sampling(tmp_path: Path) -> None:
    rollout = {"max_response_tokens": 6, "top_p": 0.9}
    distillation_config(tmp_path, tmp_path, tmp_path, actor={"loss": "topk_forward_kl"}, rollout=rollout)
