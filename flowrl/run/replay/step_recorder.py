"""Records steps of a run: the batch, the states before the step, its calls and metrics, and checksums of the states
after it.
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowrl.checkpoints.run_folder import RunFolder
from flowrl.checkpoints.saver import Saver, package_versions
from flowrl.config import CheckpointConfig, RunConfig, models_of, shards_model
from flowrl.config.engines.train_engines import DEFAULT_TRAIN_ENGINE
from flowrl.controller.cluster import TASKS, Cluster
from flowrl.controller.errors import FlowError
from flowrl.controller.group import WorkerGroup
from flowrl.controller.placement.plan import Plan
from flowrl.controller.worker import Worker
from flowrl.data.batch.batch import Batch
from flowrl.data.checksums import FileChecksum, write_json_with_checksum
from flowrl.data.metric import Logged
from flowrl.devices.device import local_tensor
from flowrl.engines.checkpoint.shards import tensor_bytes
from flowrl.engines.train.base import SavedEngine
from flowrl.health.monitor import Finding
from flowrl.report.run_observer import RunObserver
from flowrl.run.monitoring.health_log import HealthLog
from flowrl.run.replay.call_log import CallLog, Described, describe, save_table
from flowrl.run.replay.recording import (
    BATCH,
    CONFIG,
    FORMAT,
    STEP,
    describe_machine,
    recordings,
    source_checksums,
)


def measure_states(groups: Mapping[str, WorkerGroup]) -> dict[str, list[Described]]:
    """Returns role -> checksums of the state on each rank, for checkpointable groups. Blocks.

    Omits groups whose workers have no engine.
    """
    states = {role: group.run(_checksum_worker) for role, group in groups.items()}
    return {role: own for role, own in states.items() if None not in own}


def find_sharded_roles(config: RunConfig, planned: Plan) -> set[str]:
    """Returns the roles that FSDP2 shards, including roles with one rank."""
    if config.backend == "inline":
        return set()
    engines = {role: value.engine for role, value in models_of(config).items()}
    return {
        role
        for role, engine in engines.items()
        if role in planned.roles
        and engine.kind == DEFAULT_TRAIN_ENGINE
        and shards_model(engine, planned.roles[role].mesh.tp)
    }


def _checksum_worker(worker: Worker) -> Described:
    engine = vars(worker).get("engine")
    return None if engine is None else state_checksums(engine)


class StepRecorder(RunObserver):
    """Records the steps of the setting `record`, and the steps that `request_next` requests.

    A recording is complete when the metrics of its step are written. Only a recorded step has additional calls. Calls
    before the step save the states and the batch, and the driver waits for them. Calls after the step compute checksums
    of the states.
    """

    def __init__(
        self, config: RunConfig, cluster: Cluster, saver: Saver, inputs: Mapping[str, FileChecksum], last_step: int
    ) -> None:
        """Removes incomplete recordings, and recordings of steps after `last_step`, which a resumed run trains again.

        `saver` has the groups and driver objects whose states checkpoints contain. Recordings contain the same states.
        `inputs` are the checksums of the input files.
        """
        self._config, self._cluster, self._inputs = config, cluster, inputs
        self._saver = Saver(recordings(config.output), CheckpointConfig(every=1, keep_last=None), ())
        self._saver.groups, self._saver.objects = saver.groups, saver.objects  # filled later
        self._log = CallLog(cluster.calls)
        self._is_requested = False
        self._recorded_checks: set[str] = set()
        """Health checks that have requested a recording."""
        self._step: int | None = None
        """Step that is being recorded, or None."""
        self._path = Path()
        self._values: dict[str, Any] = {}
        """Values of `step.json` so far."""
        self._recordings = recordings(config.output)
        self._recordings.remove_unfinished()
        for later in self._recordings.steps():
            if later > last_step:
                self._recordings.remove(later)

    def check(self) -> None:
        """Raises UserError if steps are recorded, but the recipe passes nothing to `run.add_checkpointable`."""
        if self._config.records_steps:
            self._saver.check_groups(f"{'record' if self._config.record else 'health.record_on'} is set")

    def request_next(self) -> None:
        """Requests a recording of the next step that begins."""
        self._is_requested = True

    def request_after_findings(self, health: HealthLog) -> None:
        """Requests a recording of the next step after the first finding of each check in `health.record_on`.

        On resume, a finding from before the checkpoint also requests a recording, unless a step after the finding is
        already recorded.
        """
        steps = self._recordings.steps()
        for finding in health.findings:
            self._add_finding(finding, is_recorded=any(step > finding.step for step in steps))
        health.add_listener(self._add_finding)

    def _add_finding(self, finding: Finding, *, is_recorded: bool = False) -> None:
        if finding.check in self._config.health.record_on and finding.check not in self._recorded_checks:
            self._recorded_checks.add(finding.check)
            if not is_recorded:
                self.request_next()

    def is_due(self, step: int) -> bool:
        return self._is_requested or step in self._config.record

    def step_begun(self, step: int, version: int, batch: Batch) -> None:
        """If a recording of the step is due, begins it: saves the batch and the states before the step. Blocks.

        The records of earlier steps must be written, and no checkpoint may be in progress. If the batch cannot be
        stored, notifies the user and does not record the step.
        """
        if not self.is_due(step):
            return
        self._is_requested = False
        driver = {"step": step, "version": version, "inputs": self._inputs}
        config = RunFolder(self._config.output).config.read_bytes()
        self._path = self._saver.begin(step, driver, {CONFIG: config}, asynchronous=False)
        self._saver.wait_for_groups()
        written = save_table(batch, self._path / BATCH).get()
        if isinstance(written, str):
            self._cluster.notify(f"step {step} is not recorded: {written}")
            self._saver.discard()
            return
        self._saver.add_files({BATCH: written})
        self._step = step
        self._values = {
            "format": FORMAT,
            "batch": {
                "columns": batch.columns,
                "sections": batch.num_sections,
                "seed": batch.seed,
                "has_tasks": batch.tasks is not None,
            },
            "versions": package_versions(),
            "machine": describe_machine(),
            "sources": source_checksums(),
            "backend": self._config.backend,
            "working_folder": os.getcwd(),
            "error": None,
        }
        self._log.entries, self._log.metrics = [], []
        self._log.start()

    def logged(self, metrics: Logged) -> None:
        self._log.add_metrics((metrics,))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records no calls in the block."""
        with self._log.paused():
            yield

    def end_calls(self) -> None:
        """Stops logging calls, saves the columns that they returned, and waits for checksums of the states.

        Does nothing if the step is not recorded, or if its calls have already ended.
        """
        if not self._log.is_running:
            return
        self._log.stop()
        self._log.save_tables(self._path)
        self._values["states"] = measure_states(self._saver.groups)
        self._values["objects"] = {name: describe(added.state()) for name, added in self._saver.objects.items()}

    def calls_done(self, step: int, values: Mapping[str, float]) -> None:
        """Completes the recording of a step, if the step is recorded. `values` are the metrics of the step."""
        if step != self._step:
            return
        calls, files = self._log.describe_calls()
        self._saver.add_files(files)
        self._values |= {"calls": calls, "metrics": self._log.merged_metrics(), "logged": sorted(values)}
        self._finish(step)
        self._cluster.notify(f"recorded step {step}: {self._command(step)}")

    def _finish(self, step: int) -> None:
        self._step = None
        called = {call.role: call.world_size for call in self._log.entries if call.role != TASKS}
        threads, sharded = self._cluster.count_threads(), find_sharded_roles(self._config, self._cluster.plan)
        self._values["roles"] = {
            role: {"world_size": world_size, "threads": threads[role], "is_sharded": role in sharded}
            for role, world_size in called.items()
        }
        self._saver.add_files({STEP: write_json_with_checksum(self._path / STEP, self._values)})
        self._saver.advance([{"step": step}], wait=True)

    def keeps_step(self, error: BaseException | None) -> bool:
        """Returns whether an incomplete recording must be completed when the run ends with `error`.

        True if the run failed. False if it ended without an error (None), by Ctrl-C, or by another signal.
        """
        return self._step is not None and isinstance(error, Exception)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Completes or removes an incomplete recording at the end of the run."""
        self._log.stop()
        if self.keeps_step(error):
            self._complete_after(error)
        self._recordings.remove_unfinished()

    def _complete_after(self, error: BaseException | None) -> None:
        """Completes the recording of a step after the run has failed with `error`.

        If the recorded step failed, the recording has the error instead of results. If the next step failed, the
        recording has the results of the recorded step as usual.
        """
        assert self._step is not None
        step = self._step
        if "objects" in self._values:  # the step has ended, and only its record is not written yet
            try:
                self.calls_done(step, {})
            except FlowError as lost:
                self._cluster.notify(f"step {step} is not recorded: {lost}")
        else:
            calls = [{"role": call.role, "method": call.method} for call in self._log.entries]
            self._values |= {"error": f"{type(error).__name__}: {error}", "calls": calls, "metrics": {}, "logged": []}
            self._values = {"states": {}, "objects": {}} | self._values
            command = self._command(step)
            self._cluster.notify(f"recorded step {step} without results, because the run failed: {command}")
            self._finish(step)

    def _command(self, step: int) -> str:
        return f"flowrl replay {self._config.output} --step {step}"


def state_checksums(engine: SavedEngine) -> dict[str, Any]:
    """Returns the checksums of the trained weights and optimizer tensors of this rank, and the engine's counters.

    The result has plain values: `tensors` maps a name to its `crc32` and `norm` (L2, in float64), and `counters` is
    `engine.counters()`. For a sharded tensor, `crc32` and `norm` are computed from this rank's shard.
    """
    state = engine.save_state(with_optimizer=engine.has_optimizer_state)
    tensors = {
        name: {"crc32": zlib.crc32(tensor_bytes(local)), "norm": float(local.detach().double().norm())}
        for name, local in ((name, local_tensor(value)) for name, value in state.items())
    }
    return {"tensors": tensors, "counters": engine.counters()}
