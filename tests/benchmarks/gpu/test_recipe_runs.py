"""Settings of the runs that need a GPU, and metrics that are read from a run."""

import json
from pathlib import Path

import pytest

from flowrl.config.load import load
from flowrl.run.preflight import plan_run
from flowrl.weight_sync.transfer import choose_transport
from recipes.grpo.config import GRPOConfig
from tests.benchmarks.gpu.recipe_runs import GRPO_CONFIG, RecipeRun, Task, single_device
from tests.benchmarks.gpu.vllm_runs import RUNS, VllmRun


def load_settings(folder: Path, settings: tuple[str, ...], num_steps: int) -> GRPOConfig:
    return load(GRPO_CONFIG, Task(folder, "cuda").grpo_settings("run", *settings, num_steps=num_steps), GRPOConfig)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_with_vllm_sends_weights_between_gpus(run: VllmRun, tmp_path: Path) -> None:
    config = load_settings(tmp_path, run.all_settings("cuda"), run.num_steps)
    roles = plan_run(config, [run.num_gpus]).roles
    transport = choose_transport(roles["actor"], roles["rollout"], "cuda", config.rollout)
    assert transport == ("nccl" if run.num_gpus == 2 else "cuda_ipc")
    assert config.rollout.sent_dtype == "bfloat16"


def test_the_run_without_ray_uses_one_gpu(tmp_path: Path) -> None:
    config = load_settings(tmp_path, ("backend=inline", *single_device("cuda")), 100)
    assert (config.backend, config.placement.device, config.steps) == ("inline", "cuda", 100)


def test_the_gain_is_the_last_minus_the_first_accuracy(tmp_path: Path) -> None:
    records = [{"accuracy": 0.25}, {"seconds": 9.0}, {"seconds": 1.0}, {"seconds": 2.0, "accuracy": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run = RecipeRun.read(tmp_path)
    assert run.gain == 0.5
    assert run.describe() == "accuracy 0.250 to 0.750 (+0.500) in 3 steps of 1.50 s"
