"""The events of a run reach its observers in a fixed order."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.data.batch.batch import Batch
from flowrl.report.progress import LiveProgress, MetricsLog
from flowrl.report.rollout_log import Row, saved_steps
from flowrl.report.run_observer import RunObserver
from flowrl.run.evaluation import evaluate
from flowrl.run.loop import Run
from flowrl.run.monitoring.health_log import HealthLog
from flowrl.run.rollout_rows import RolloutSaver
from tests.run.echo_run import Counting, EchoConfig, held_out_prompts, lines, stream

Configs = Callable[..., EchoConfig]


class Recorded(RunObserver):
    """Records the events, and the files that exist at each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[tuple[str, int | None]] = []
        self.written: dict[tuple[str, int], tuple[bool, bool, bool]] = {}
        """Event and step -> whether the step has its rows, its metrics and its checkpoint at this event."""

    def begun(self) -> None:
        self.events.append(("begun", None))

    def step_begun(self, step: int, version: int, batch: Batch) -> None:
        self.events.append(("step_begun", step))

    def calls_done(self, step: int, values: Mapping[str, float]) -> None:
        self.events.append(("calls_done", step))

    def evaluated(self, step: int, values: Mapping[str, float], rows: Sequence[Row], num_examples: int) -> None:
        self.events.append(("evaluated", step))

    def step_done(self, step: int, values: Mapping[str, float]) -> None:
        self.events.append(("step_done", step))
        self._look("step_done", step)

    def saved(self, step: int) -> None:
        self.events.append(("saved", step))
        self._look("saved", step)

    def _look(self, event: str, step: int) -> None:
        self.written[event, step] = (
            step in saved_steps(self.folder / "rollouts", "training"),
            f'"step": {step},' in (self.folder / "metrics.jsonl").read_text(),
            step in Checkpoints(self.folder).steps(),
        )

    def ended(self, summary: Mapping[str, Any]) -> None:
        assert summary["steps"] == 2
        self.events.append(("ended", None))


def train(config: EchoConfig) -> Recorded:
    prompts, held_out = stream(config), held_out_prompts(config)
    with Run(config) as run:
        recorded = Recorded(run.folder.path)
        observers = run._observers.observers
        at = [type(observer) for observer in observers].index(MetricsLog)  # after the rows, before the metrics
        run._observers.observers = (*observers[:at], recorded, *observers[at:])
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        for batch in run.rollouts(actor, prompts, policy=actor):
            batch["scores"] = actor.score(batch)
            run.save_rollouts(batch)
            run.log(actor.update(batch))
            run.sync_weights(actor, actor)
            if run.due(config.evaluate_every):
                run.log(evaluate(actor, actor, held_out))
        run.finish()
    return recorded


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_are_written_before_metrics_and_metrics_before_the_checkpoint(config: Configs, asynchronous: bool) -> None:
    checkpoint = {"every": 1, "keep_last": None, "asynchronous": asynchronous}
    settings = config(steps=2, checkpoint=checkpoint, report={"rollouts": {"every": 1}})
    recorded = train(settings)
    assert recorded.written == {
        **{("step_done", step): (True, False, False) for step in (1, 2)},
        **{("saved", step): (True, True, False) for step in (1, 2)},
    }
    assert Checkpoints(settings.output).steps() == [1, 2]


def test_each_step_has_its_events_in_order(config: Configs) -> None:
    settings = config(steps=2, evaluate_every=2, checkpoint={"every": 2, "asynchronous": False})
    assert train(settings).events == [
        ("begun", None),
        ("step_begun", 1),
        ("step_begun", 2),  # the driver is one step ahead
        ("step_done", 1),
        ("calls_done", 1),
        ("evaluated", 2),
        ("step_done", 2),
        ("calls_done", 2),
        ("saved", 2),
        ("ended", None),
    ]
    assert [line["step"] for line in lines(settings)] == [1, 2]


def test_the_list_of_observers_is_the_order_of_the_files(config: Configs) -> None:
    with Run(config(steps=1)) as run:
        kinds = [type(observer) for observer in run._observers.observers]
    order = [RolloutSaver, MetricsLog, LiveProgress, HealthLog]
    assert [kind for kind in kinds if kind in order] == order and len(set(kinds)) == len(kinds)


def test_an_observer_can_end_the_run_after_its_step(config: Configs) -> None:
    class Stopping(RunObserver):
        reason: str | None = None

        @property
        def stop_reason(self) -> str | None:
            return self.reason

        def step_done(self, step: int, values: Mapping[str, float]) -> None:
            self.reason = self.reason or f"step {step} is enough"

    settings = config(steps=5)
    prompts = stream(settings)
    with pytest.raises(ValueError, match="step 1 is enough"), Run(settings) as run:
        run._observers.observers = (*run._observers.observers, Stopping())
        actor: Any = run.group("actor", Counting)
        for batch in run.rollouts(actor, prompts, policy=actor):
            batch["scores"] = actor.score(batch)
            run.log(actor.update(batch))
            run.sync_weights(actor, actor)
        run.finish()
    assert [line["step"] for line in lines(settings)] == [1, 2]
