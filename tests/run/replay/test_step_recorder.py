"""Recordings of runs whose workers only count: which steps are recorded, resumes, and removal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl import Batch
from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.table_files import read_batch
from flowrl.config import UserError, load
from flowrl.data.metric import Mean
from flowrl.health import read_findings
from flowrl.run.loop import Run
from flowrl.run.replay.recording import BATCH, read_recording, recordings
from flowrl.run.replay.step_recorder import find_sharded_roles
from recipes.ppo.config import PPOConfig
from tests.configs import plan_run
from tests.errors import rejects
from tests.run.conftest import config, task
from tests.run.echo_run import QUIET, Counting, Echo, EchoConfig

__all__ = ["config", "task"]  # fixtures

ROOT = Path(__file__).parents[3]


def train(settings: EchoConfig, *, until: int | None = None, requests: tuple[int, ...] = ()) -> None:
    """Trains on numbered rows. Fails in step `until`, and requests a recording in the steps `requests`."""
    rows = [Batch.from_rows([{"scores": float(step)}, {"scores": 0.0}]) for step in range(settings.steps)]
    with Run(settings) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        for batch in run.batches(rows, policy=actor):
            if run.step == until:
                raise UserError("stopped")
            run.log(actor.update(batch))
            if run.step in requests:
                run.record_next_step()
        run.finish()


def test_consecutive_steps_are_recorded_beside_checkpoints(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET, record=[2, 3], checkpoint={"every": 1, "keep_last": 1})
    train(settings)
    assert recordings(settings.output).steps() == [2, 3]
    assert Checkpoints(settings.output).steps() == [4]
    recording = read_recording(settings.output, 3)
    assert read_batch(recording.path / BATCH).get("scores").tolist() == [2.0, 0.0]
    assert [call["method"] for call in recording.values["calls"]] == ["update"]
    assert recording.values["metrics"] == {"reward": 1.0}
    assert (recording.path / "actor" / "count").read_text() == "2"


def test_a_requested_step_is_recorded_once(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET)
    train(settings, requests=(2,))
    assert recordings(settings.output).steps() == [3]


def train_with_skipped_updates(settings: EchoConfig, *, until: int | None = None) -> None:
    """Saves a checkpoint of each step. All updates from step 2 on are skipped. Fails in step `until`."""
    with Run(settings) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        for batch in run.batches([Batch.from_rows([{"scores": 1.0}])] * settings.steps, policy=actor):
            if run.step == until:
                raise UserError("stopped")
            run.log(actor.update(batch), {"actor/skipped_update": Mean(float(run.step >= 2), 1)})
        run.finish()


def test_a_step_after_the_first_finding_is_recorded(config: Callable[..., EchoConfig]) -> None:
    """All updates from step 2 on are skipped, which the check finds once it has seen two such steps."""
    settings = config(report=QUIET, steps=8, health={"steps": 2, "record_on": ["skipped_updates"]})
    train_with_skipped_updates(settings)
    (finding,) = read_findings(settings.output)
    assert finding.check == "skipped_updates"
    (step,) = recordings(settings.output).steps()
    assert step > finding.step  # the next step may have begun before the metrics of the finding are complete
    assert (read_recording(settings.output, step).path / "actor" / "count").read_text() == str(step - 1)


@pytest.mark.parametrize("until", [4, 6])
def test_a_resumed_run_records_a_step_after_an_earlier_finding_once(
    config: Callable[..., EchoConfig], until: int
) -> None:
    """The finding begins in step 3. A run that fails in step 4 continues after step 3, without the recorded step 4."""
    health = {"steps": 2, "record_on": ["skipped_updates"]}
    settings = config(report=QUIET, steps=8, health=health, checkpoint={"every": 1})
    with rejects("stopped"):
        train_with_skipped_updates(settings, until=until)
    train_with_skipped_updates(settings.model_copy(update={"resume": "auto"}))
    (finding,) = read_findings(settings.output)
    (step,) = recordings(settings.output).steps()
    assert finding.step < step <= 5


def test_a_resumed_run_replaces_later_recordings(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET, record=[1, 3, 4], checkpoint={"every": 2})
    train(settings)
    (Checkpoints(settings.output).folder(4) / "manifest.json").unlink()  # as if the run had been killed
    (settings.output / "summary.json").unlink()
    train(settings.model_copy(update={"resume": "auto", "record": (4,)}))
    assert recordings(settings.output).steps() == [1, 4]


def test_a_step_that_fails_is_recorded_without_results(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET, record=[2])
    with rejects("stopped"):
        train(settings, until=2)
    values = read_recording(settings.output, 2).values
    assert "stopped" in values["error"] and values["metrics"] == {}


def test_no_incomplete_recording_is_left(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET, record=[2])
    with pytest.raises(KeyboardInterrupt), Run(settings) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        for batch in run.batches([Batch.from_rows([{"scores": 1.0}])] * 3, policy=actor):
            run.log(actor.update(batch))
            if run.step == 2:
                raise KeyboardInterrupt
    assert not list(recordings(settings.output).path.glob("*"))


def test_a_recipe_without_checkpointable_roles_cannot_be_recorded(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET, record=[1])
    with rejects("record", "run.add_checkpointable"), Run(settings) as run:
        actor: Any = run.group("actor", Echo)
        for _ in run.batches([Batch.from_rows([{"scores": 1.0}])], policy=actor):
            pass


def test_a_column_that_cannot_be_stored_skips_the_recording(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET, record=[1])
    with Run(settings) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        for batch in run.batches([Batch.from_rows([{"scores": 1.0, "other": Path("x")}])], policy=actor):
            run.log(actor.update(batch))
        assert run.finish()["steps"] == 1
    assert recordings(settings.output).steps() == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("placement.device=cuda",), set()),
        (("placement.device=cuda", "actor.engine.strategy=fsdp"), {"actor"}),
        (("placement.device=cpu",), set()),
        (("placement.device=cpu", "critic.engine.strategy=fsdp"), {"critic"}),
    ],
)
def test_the_recording_of_a_step_names_its_sharded_roles(settings: tuple[str, ...], expected: set[str]) -> None:
    values = ["placement=single", "placement.memory_gb=80", "backend=ray", *settings]
    config = load(ROOT / "recipes/ppo/qwen1.5b.yaml", values, PPOConfig)
    assert find_sharded_roles(config, plan_run(config, [1])) == expected
