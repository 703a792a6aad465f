"""The result of a model on a task, from an evaluation that may be pending."""

from pathlib import Path

import torch

from flowrl.config import ConfigError, EvaluationConfig, EvaluationRunConfig, ReplicaSizes, RolloutConfig
from flowrl.data.folders.input_paths import read_text_config
from flowrl.inference.evaluation.model_scores import _collect, check_evaluation
from flowrl.run.evaluation import Evaluation, PendingEvaluation, PromptScores
from tests.errors import rejects


def test_a_pending_evaluation_has_its_scores_and_rows() -> None:
    scores: dict[str, PromptScores] = {}

    def measure() -> Evaluation:
        scores[""] = PromptScores(torch.tensor([[1.0, 0.0]]), [7], [None])
        return Evaluation({"accuracy": 0.5}, 1, [{"prompt": "p", "sample": sample} for sample in range(2)])

    pending = PendingEvaluation([], 1, measure)
    pending.scores = scores
    result = _collect("hard", pending, EvaluationConfig(samples=2, temperature=1.0, pass_score=0.5))
    assert result.metrics == {"accuracy": 0.5} and result.scores is scores[""] and result.pass_score == 0.5
    assert result.prompts == ["p"] and [row["set"] for row in result.rows] == ["hard"] * 2


def evaluation_of(task: Path, memory_gb: float) -> EvaluationRunConfig:
    return EvaluationRunConfig.model_validate({
        "actor": {"model": {"path": str(task / "model"), "dtype": "float32"}},
        "data": {"test": str(task / "test.jsonl"), "max_prompt_tokens": 16, "evaluation_rows": 3},
        "reward": {"function": "recipes.quickstart.task:score"},
        "rollout": {"max_response_tokens": 8},
        "placement": {
            "device": "cpu",
            "pools": {"main": "all"},
            "roles": dict.fromkeys(("actor", "rollout", "reward"), "main"),
            "memory_gb": memory_gb,
        },
    })  # fmt: skip


def test_too_little_memory_is_found_before_the_cluster_starts(task_folder: Path) -> None:
    with rejects("rollout", "0.0", error=ConfigError):
        check_evaluation(evaluation_of(task_folder, 1e-6))


def test_devices_that_the_engine_cannot_use_together_are_rejected(task_folder: Path) -> None:
    config = evaluation_of(task_folder, 1.0)
    with rejects("placement.roles.rollout", "tp", 2, "vllm", error=ConfigError):
        check_evaluation(config, 2, ReplicaSizes(tp=2))
    vllm = config.model_copy(update={"rollout": RolloutConfig(engine="vllm", max_response_tokens=8)})
    heads = read_text_config(config.actor.model.path)["num_attention_heads"]
    with rejects("placement.roles.rollout", "tp", heads + 1, "heads", error=ConfigError):
        check_evaluation(vllm, heads + 1, ReplicaSizes(tp=heads + 1))


def test_the_memory_is_that_of_the_roles_that_generate_and_score(task_folder: Path) -> None:
    checked, held_out = check_evaluation(evaluation_of(task_folder, 1.0))
    (device,) = checked.fitted.devices
    assert list(device.roles) == ["rollout", "reward"] and 0 < device.peak[0] < 1e9
    assert len(held_out[""]) == 3
