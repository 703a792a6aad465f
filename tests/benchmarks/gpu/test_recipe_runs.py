"""Settings of the runs that need a GPU, and metrics that are read from a run."""

import json
import time
from pathlib import Path

import pytest

from flowrl.config.load import load
from flowrl.controller.placement.weight_transport import choose_transport
from recipes.grpo.config import GRPOConfig
from tests.benchmarks.gpu.cells import CellSkipped
from tests.benchmarks.gpu.recipe_runs import GRPO_CONFIG, RecipeRun, Task, run_program, single_device
from tests.benchmarks.gpu.vllm_runs import RUNS, VllmRun
from tests.configs import plan_run


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
    assert config.evaluate_every is None


def read_run(folder: Path, *records: dict[str, float]) -> RecipeRun:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return RecipeRun.read(folder)


def test_the_gain_is_the_last_minus_the_first_accuracy(tmp_path: Path) -> None:
    run = read_run(tmp_path, {"accuracy": 0.25}, {"seconds": 9.0}, {"seconds": 1.0}, {"seconds": 2.0, "accuracy": 0.75})
    assert run.is_complete and run.gain == 0.5
    assert run.describe() == "accuracy 0.250 to 0.750 (+0.500) in 3 steps of 1.50 s"


def test_a_run_without_its_last_steps_has_the_gain_of_the_reward(tmp_path: Path) -> None:
    rewards = [0.1, 0.2, 0.2, 0.2, 0.3, 0.9, 0.4, 0.5, 0.5, 0.5, 0.6]
    run = read_run(tmp_path, {"accuracy": 0.25}, *({"seconds": 0.5, "reward": reward} for reward in rewards))
    assert not run.is_complete
    run.check_gain("figures")
    assert run.describe() == "ended by the time limit, reward 0.200 to 0.500 (+0.300) in 11 steps of 0.50 s"


def test_a_complete_run_that_does_not_learn_fails(tmp_path: Path) -> None:
    run = read_run(tmp_path, {"accuracy": 0.25}, {"seconds": 9.0}, {"seconds": 1.0, "accuracy": 0.3})
    with pytest.raises(AssertionError, match="figures"):
        run.check_gain("figures")


def test_a_run_without_a_second_step_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(CellSkipped):
        RecipeRun.read(tmp_path)
    with pytest.raises(CellSkipped):
        read_run(tmp_path, {"accuracy": 0.25}, {"seconds": 9.0})


def test_a_program_ends_at_its_time() -> None:
    start_s = time.time()
    assert not run_program("timeit", "-n", "1", "-s", "import time", "time.sleep(60)", end_s=start_s + 0.3)
    assert time.time() - start_s < 30
    assert run_program("timeit", "-n", "1", "pass", end_s=time.time() + 300)
