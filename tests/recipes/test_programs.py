"""The recipes in tests/recipes/programs take three steps, with the values that their papers give."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from flowrl import Batch
from flowrl.config import RolloutConfig, RunConfig, TrainedConfig
from flowrl.data.chat import ChatTokenizer
from flowrl.data.prompts import PromptStream, read_conversations
from flowrl.report.rollout_log import read_rows
from flowrl.run.loop import Run
from flowrl.workers import Actor, Rollout
from tests.recipes.programs import distillation, dpo, dynamic_sampling, ppo_ptx
from tests.recipes.programs.configs import GroupConfig, PtxConfig

HERE = "tests.recipes.test_programs"
MAX_LINES = 40


def count_digits(response: str, **_: object) -> float:
    return float(sum(character.isdigit() for character in response) % 2)


def settings(folder: Path, output: Path, **roles: dict[str, Any]) -> dict[str, Any]:
    model = {"model": {"path": folder / "model"}}
    trained = model | {"optimizer": {"lr": 1e-3}}
    placement = {"device": "cpu", "pools": {"main": [1]}, "roles": dict.fromkeys(["actor", *roles], "main")}
    common = {"output": output, "steps": 3, "seed": 3, "backend": "inline", "threads": 1, "placement": placement}
    kinds = {"actor": trained, "critic": trained, "reference": model, "teacher": model}
    kinds |= {"rollout": {"max_response_tokens": 6}, "reward": {"function": f"{HERE}:count_digits"}}
    return common | {role: kinds[role] | changes for role, changes in {"actor": {}, **roles}.items()}


def prompts(folder: Path, num_rows: int) -> Iterator[Batch]:
    conversations = read_conversations(folder / "train.jsonl", last="user")
    stream = PromptStream(conversations, ChatTokenizer(folder / "model"), seed=0, max_prompt_tokens=10)
    while True:
        yield Batch.from_rows(stream.take(num_rows))


def rows(*responses: list[int], prompt: list[int], **columns: list[int]) -> Batch:
    ids = [token for response in responses for token in [*prompt, *response]]
    mask = [i >= len(prompt) for response in responses for i in range(len(prompt) + len(response))]
    lengths = [len(prompt) + len(response) for response in responses]
    return Batch.from_columns(columns, {"input_ids": ids, "response_mask": mask}, lengths)


def records(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("step")]


@pytest.mark.parametrize("program", [dpo, ppo_ptx, dynamic_sampling, distillation])
def test_a_program_is_short(program: Any) -> None:
    assert len(Path(program.__file__).read_text().splitlines()) <= MAX_LINES


def test_dpo_starts_at_log_2_and_separates_the_pair(task_folder: Path, tmp_path: Path) -> None:
    config = dpo.DPOConfig.model_validate(settings(task_folder, tmp_path / "run", reference={}))
    pair = rows([6, 1], [7, 8, 1], prompt=[4, 12], pair=[0, 0])
    dpo.train(config, [pair] * 3)
    first, second, third = records(config.output)
    assert first["actor/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["actor/loss"] > second["actor/loss"] > third["actor/loss"]


@pytest.mark.slow
def test_ptx_adds_its_loss_to_every_update(task_folder: Path, tmp_path: Path) -> None:
    roles: dict[str, dict] = {role: {} for role in ("rollout", "critic", "reference", "reward")}
    algorithm = {"algorithm": {"estimator": "gae", "kl_coef": 0.1}}
    base = settings(task_folder, tmp_path / "run", **roles) | algorithm
    text = rows([3, 12, 4, 14], prompt=[2])
    losses = {}
    for coef in (0.0, 1.0):
        config = PtxConfig.model_validate(base | {"ptx_coef": coef, "output": tmp_path / f"run{coef}"})
        ppo_ptx.train(config, prompts(task_folder, 16), [text] * 3)
        losses[coef] = [record["actor/ptx/loss"] for record in records(config.output)]
    assert len(losses[1.0]) == 3 and losses[1.0][2] < losses[1.0][0]
    assert losses[1.0][2] < losses[0.0][2]


@pytest.mark.slow
def test_dynamic_sampling_trains_only_on_prompts_with_different_scores(task_folder: Path, tmp_path: Path) -> None:
    base = settings(task_folder, tmp_path / "run", rollout={}, reward={})
    sizes = {"batch_size": 16, "samples_per_prompt": 4, "algorithm": {"estimator": "grpo"}}
    config = GroupConfig.model_validate(base | sizes | {"report": {"rollouts": {"every": 1, "rows": 16}}})
    dynamic_sampling.train(config, prompts(task_folder, 2))
    for step in (1, 2, 3):
        scores: defaultdict[int, list[float]] = defaultdict(list)
        for row in read_rows(config.output / "rollouts", "training", step):
            scores[row["prompt_id"]].append(row["score"])
        assert [len(own) for own in scores.values()] == [4] * 4
        versions = {row["version"] for row in read_rows(config.output / "rollouts", "training", step)}
        assert versions == {step - 1}, "a batch is sampled with the weights of the previous step"
        assert all(len(set(own)) == 2 for own in scores.values())


class StudentConfig(RunConfig):
    rollout: RolloutConfig
    student: TrainedConfig


@pytest.mark.slow
def test_the_policy_may_have_another_role_than_actor(task_folder: Path, tmp_path: Path) -> None:
    base = settings(task_folder, tmp_path / "run", rollout={})
    base["student"] = base.pop("actor")
    base["placement"]["roles"] = {"student": "main", "rollout": "main"}
    config = StudentConfig.model_validate(base)
    versions = []
    with Run(config) as run:
        student = run.group("student", Actor, config.student)
        rollout = run.group("rollout", Rollout, config.rollout, config.student.model, seed=0)
        for batch in run.batches(prompts(task_folder, 4), policy=student):
            batch = batch.union(rollout.generate(batch))
            versions.append(int(batch.get("weight_version").max()))
            run.log(student.update(batch))
            run.sync_weights(student, rollout)
        run.finish()
    assert versions == [0, 1, 2]


@pytest.mark.slow
def test_distillation_has_no_loss_for_an_equal_teacher_and_approaches_another(
    task_folder: Path, tmp_path: Path
) -> None:
    base = settings(task_folder, tmp_path / "run", rollout={}, teacher={})
    config = distillation.DistillationConfig.model_validate(base)
    distillation.train(config, prompts(task_folder, 8))
    assert abs(records(config.output)[0]["actor/loss"]) < 1e-6

    teacher = AutoModelForCausalLM.from_pretrained(task_folder / "model")
    teacher.lm_head.weight.data.mul_(3.0)
    copytree(task_folder / "model", tmp_path / "teacher")
    teacher.save_pretrained(tmp_path / "teacher")
    changes = {"output": tmp_path / "other", "teacher": {"model": {"path": tmp_path / "teacher"}}}
    config = distillation.DistillationConfig.model_validate(base | changes)
    distillation.train(config, prompts(task_folder, 8))
    losses = [record["actor/loss"] for record in records(config.output)]
    assert losses[0] > losses[1] > losses[2] > 0
