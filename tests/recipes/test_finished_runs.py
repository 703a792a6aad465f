"""Claims about a whole run with many features: text of PTX, and replays of recorded steps."""

import json
from pathlib import Path

from flowrl.run.replay.recording import read_recording
from flowrl.run.replay.step_replay import RESULT, replay_step
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from tests.recipes.conftest import FinishedRun
from tests.recipes.test_numbers import metrics_of


def test_the_loss_of_the_text_of_ptx_falls(sync_run: FinishedRun[PPOConfig]) -> None:
    losses = [record["actor/ptx/loss"] for record in metrics_of(sync_run.config)[1:]]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_a_step_with_all_features_is_replayed_bitwise(sync_run: FinishedRun[PPOConfig], tmp_path: Path) -> None:
    config = sync_run.config
    replay_step(read_recording(config.output, 2), config, train_ppo, output=tmp_path / "replay")
    assert_identical(tmp_path / "replay")


def test_a_step_of_episodes_on_ray_is_replayed_bitwise_in_one_process(
    one_step_off_run: FinishedRun[GRPOConfig], tmp_path: Path
) -> None:
    config = one_step_off_run.config
    replay_step(read_recording(config.output, 2), config, train_grpo, output=tmp_path / "replay")
    assert_identical(tmp_path / "replay")


def assert_identical(replay: Path) -> None:
    """Asserts that the calls, the metrics and the state of the actor are compared and equal."""
    result = json.loads((replay / RESULT).read_text())
    counts = {part["name"]: part["count"] for part in result["compared"]}
    assert result["is_identical"] and all(counts[name] for name in ("calls", "metrics", "state of actor"))
