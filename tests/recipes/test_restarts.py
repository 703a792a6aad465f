"""A killed trainer rank restarts the run from its checkpoint and retains the rollout replicas."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import Placement, to_yaml
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train
from tests.recipes import losing
from tests.recipes.test_numbers import metrics_of
from tests.slow_cases import one_of

Configs = Callable[..., PPOConfig]
OWN = "tests.recipes.losing"
SPLIT = Placement(
    device="cpu",
    pools={"train": [2], "rest": [1]},
    roles={"actor": "train", "critic": "train"} | dict.fromkeys(("reference", "reward", "rollout"), "rest"),
)


def losing_config(ppo_config: Configs, output: Path, **changes: Any) -> PPOConfig:
    actor = ppo_config().actor.model_dump(include={"model", "optimizer"}, exclude_unset=True) | {"loss": f"{OWN}:loss"}
    reward = {
        "function": f"{OWN}:score",
        "options": {"folder": str(output.parent)},
        "workers": 1,
        "evaluation": "recipes.quickstart.task:exact",
    }
    settings = {"recipe": "recipes.ppo.config:PPOConfig", "backend": "ray", "placement": SPLIT, "steps": 5}
    return ppo_config(**settings, actor=actor, reward=reward, output=output, checkpoint={"every": 1}, **changes)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", one_of("sync", "one_step_off"))
def test_a_killed_trainer_rank_repeats_the_steps_since_the_checkpoint_and_restarts_no_replica(
    ray_session: None, ppo_config: Configs, tmp_path: Path, kind: str
) -> None:
    config = losing_config(ppo_config, tmp_path / "run", schedule={"kind": kind})
    run_with_lost_trainer(config, tmp_path)
    straight = losing_config(ppo_config, tmp_path / "straight", schedule={"kind": kind})
    train(straight)
    assert metrics_of(config) == metrics_of(straight)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_retained_streaming_replicas_keep_their_processes_and_completed_rollouts_are_trained(
    ray_session: None, ppo_config: Configs, tmp_path: Path
) -> None:
    config = losing_config(ppo_config, tmp_path / "run", schedule={"kind": "async", "max_staleness": 2})
    run_with_lost_trainer(config, tmp_path)
    lines = metrics_of(config)[1:]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["staleness_max"] <= 2 for line in lines)
    state = Checkpoints(config.output).read(5).driver()["objects"]["prompts"]
    assert state["drawn"] == 5 * config.prompts_per_step and state["untrained"] == []


def run_with_lost_trainer(config: PPOConfig, tmp_path: Path) -> None:
    """Runs the recipe as a program that loses an actor rank, resumes, and starts no other rollout replica."""
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "recipes.ppo.train", str(tmp_path / "config.yaml")]
    environment = os.environ | {losing.FOLDER: str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stdout + done.stderr
    output = " ".join(done.stdout.split())
    assert re.search(r"rank 1 \(node 0\)", output), output
    assert re.search(r"restart 1 of 3: .*step [23]; .*rollout", output), output
    assert len(list(tmp_path.glob(f"{losing.LOST}*"))) == 1
    # The process of the reward function ends with its worker, which shares a process with the rollout.
    assert len(list(tmp_path.glob(f"{losing.SCORED}*"))) == 1
