"""ReplayedRun: replaces `Run` in a recipe that `flowrl replay` runs, and yields only the recorded batch."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from flowrl.checkpoints.run_folder import RunFolder
from flowrl.checkpoints.saver import Checkpointable, Saver
from flowrl.checkpoints.table_files import read_batch
from flowrl.config import CheckpointConfig, Placement, RolloutConfig, RunConfig, UserError
from flowrl.controller.cluster import Cluster
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.folders.private_folder import create_folder
from flowrl.data.metric import Logged
from flowrl.memory.device_settings import resolve_settings
from flowrl.run.replay.call_log import CallLog, describe
from flowrl.run.replay.recording import BATCH, Recording, StepResults, recordings
from flowrl.run.replay.step_recorder import measure_states
from flowrl.run.role_groups import group_arguments, start_scoring
from flowrl.schedules.rewards import Scoring


@dataclass
class Replay:
    """A replay of a recorded step."""

    recording: Recording
    folder: Path
    """Folder for the results: the columns that calls return, in `calls/`."""
    backend: str
    """`inline` runs one rank of each role in this process. `ray` starts the processes of the config's placement."""
    notify: Callable[[str], None]
    before_step: Callable[[FrameType], None] = lambda frame: None
    """Called with the frame of the recipe before the loop body runs."""
    results: StepResults | None = field(default=None)
    """Results of the step. None until the recipe has ended, or if it has not run the step."""


class DeferredGroup:
    """A worker group that starts when one of its methods is first used, because a replay uses only few groups."""

    def __init__(self, role: str, start: Callable[[], WorkerGroup], rejection: str = "") -> None:
        """`rejection` states why the group cannot start. It is empty if the group can start."""
        self.role, self._start, self._rejection = role, start, rejection

    @cached_property
    def _group(self) -> WorkerGroup:
        return self._start()

    def __getattr__(self, name: str) -> Any:  # Any: a method of the group
        if name.startswith("__"):
            raise AttributeError(name)
        if self._rejection:
            raise UserError(f"the step calls {self.role}.{name}, but {self._rejection}")
        return getattr(self._group, name)


class ReplayedRun:
    """Has the public methods of `Run`. Runs the loop body once, on the recorded batch and the recorded states.

    Skips evaluations, weight syncs and checkpoints, and writes no files of the run. Groups of stateless workers start
    only if the step uses them. `Run` documents the methods.
    """

    def __init__(self, config: RunConfig, replay: Replay) -> None:
        self.config, self._replay = config, replay
        recording = replay.recording
        self.step = recording.step - 1
        self.version: int = recording.checkpoint.driver()["version"]
        self._saver = Saver(recordings(recording.path.parents[1]), CheckpointConfig(), ())
        self._states: dict[str, Any] = {}
        self._has_run = False

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            self.folder = RunFolder(resources.enter_context(create_folder("replay")))
            self.cluster = resources.enter_context(self._make_cluster())
            self._applied = resolve_settings(self.config, self.cluster.plan)
            self._log = CallLog(self.cluster.calls)
            self._resources = resources.pop_all()
        return self

    def _make_cluster(self) -> Cluster:
        config, is_inline = self.config, self._replay.backend == "inline"
        placement = config.placement
        if is_inline:  # the inline backend has one rank per role
            device = placement.device
            placement = Placement(device=device, pools={"main": [1]}, roles=dict.fromkeys(config.roles, "main"))
        return Cluster(
            placement,
            backend="inline" if is_inline else "ray",
            devices=None if is_inline else config.devices,
            roles=config.roles,
            dedicated=() if is_inline else config.dedicated_roles(),
            num_threads=self._replay.recording.num_threads,
            deterministic=config.deterministic,
            notify=self._replay.notify,
        )

    def group(self, role: str, cls: Any, *args: Any, **kwargs: Any) -> Any:  # Any: as in Run
        applied = group_arguments(self.config, self._applied, role, args, kwargs)
        if applied is None:
            return None
        args, kwargs = applied
        if not cls.stateless:
            return self.cluster.group(role, cls, *args, **kwargs)
        generates = isinstance(self.config.role_settings[role], RolloutConfig)
        rejection = "a replay does not generate responses in the loop body: move the call before the loop" * generates
        return DeferredGroup(role, lambda: self.cluster.group(role, cls, *args, **kwargs), rejection)

    def rewards(self) -> Scoring:
        return start_scoring(self.config, self.group)

    def add_checkpointable(self, *parts: WorkerGroup | Checkpointable) -> None:
        groups = [part for part in parts if isinstance(part, WorkerGroup)]
        objects = [part for part in parts if not isinstance(part, WorkerGroup | DeferredGroup)]
        self._saver.add(groups, {type(part).__name__.lower(): part for part in objects})

    # The step.

    def rollouts(self, rollout: WorkerGroup, prompts: object, *, policy: WorkerGroup, reward: Any = None) -> Any:
        return self._run_step(policy)

    def batches(self, stream: Iterable[Batch], *, policy: WorkerGroup) -> Iterator[Batch]:
        return self._run_step(policy)

    def _run_step(self, policy: WorkerGroup) -> Iterator[Batch]:
        recording = self._replay.recording
        self._saver.restore(recording.checkpoint)
        self.cluster.wait_for_calls()
        self.step += 1
        stored = recording.values["batch"]
        batch = read_batch(recording.path / BATCH).select(*stored["columns"])
        if stored["has_tasks"]:
            batch = batch.with_tasks(policy.tasks)
        batch = batch.with_sections(stored["sections"]).with_seed(stored["seed"])
        self._has_run = True
        self._log.start()
        recipe = sys._getframe().f_back
        assert recipe is not None
        self._replay.before_step(recipe)
        yield batch
        self._end_calls()

    def _end_calls(self) -> None:
        if not self._log.is_running:
            return
        self._log.stop()
        self._log.save_tables(self._replay.folder)
        self._states = {
            "states": measure_states(self._saver.groups),
            "objects": {name: describe(added.state()) for name, added in self._saver.objects.items()},
        }

    def log(self, *metrics: Logged) -> None:
        self._log.add_metrics(metrics)

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        self.version += 1

    def due(self, every: int | None) -> bool:
        """Ends the logged part of the step, and returns False, so that evaluations in the loop body are skipped."""
        self._end_calls()
        return False

    def add_evaluation(self, held_out: Mapping[str, Batch], evaluate: Callable[..., Any]) -> None:  # Any: as in Run
        """Does nothing."""

    def record_next_step(self) -> None:
        """Does nothing."""

    def save_rollouts(self, batch: Batch) -> None:
        """Does nothing."""

    def save_model(self, group: WorkerGroup) -> None:
        """Does nothing."""

    def finish(self) -> dict[str, Any]:
        """Returns an empty summary."""
        self._end_calls()
        return {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._has_run:
                self._end_calls()
                calls, _ = self._log.describe_calls()
                values = {"calls": calls, "metrics": self._log.merged_metrics()} | self._states
                self._replay.results = StepResults(values, self._replay.folder)
        finally:
            self._log.stop()
            self._resources.__exit__(kind, error, trace)
