"""Defines Run: the steps of a recipe, with metrics, evaluation, checkpoints and results."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from itertools import islice
from types import TracebackType
from typing import Any, ParamSpec, Self, overload

from flowrl.checkpoints.checkpoints import Checkpoint, Checkpoints
from flowrl.checkpoints.inputs import input_checksums
from flowrl.checkpoints.resume import find_checkpoint, is_resuming, warn_about_threads
from flowrl.checkpoints.run_folder import (
    RunFolder,
    folder_lock,
    log_to_file,
    remove_temporary_files,
    replacing,
    write_json,
)
from flowrl.checkpoints.saver import Checkpointable, Saver
from flowrl.config import RolloutRunConfig, RunConfig, UserError
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.controller.backends.base import RAY_LOGGER
from flowrl.controller.cluster import Cluster
from flowrl.controller.errors import FlowError
from flowrl.controller.group import WorkerGroup
from flowrl.controller.worker import GroupType, Worker
from flowrl.data.batch.batch import Batch
from flowrl.data.checksums import FileChecksum
from flowrl.data.metric import Logged
from flowrl.data.prompts import PromptStream
from flowrl.data.template import template_text
from flowrl.memory.device_settings import apply_devices
from flowrl.report.chrome_trace import Trace, TraceError, read_trace
from flowrl.report.progress import LiveProgress, MetricsLog
from flowrl.report.trackers.open_trackers import open_trackers
from flowrl.report.trackers.tracker import TrackedRun
from flowrl.run.datasets.row_batches import Lookahead, Skippable
from flowrl.run.datasets.templates import conversation_template, save_template
from flowrl.run.evaluation import Evaluation, EvaluationHistory, PendingEvaluation
from flowrl.run.interrupt import Interruption
from flowrl.run.monitoring.step_checks import StepChecks
from flowrl.run.preflight import check_engines, plan_run
from flowrl.run.replay.replayed_run import make_replayed_run
from flowrl.run.replay.step_recorder import StepRecorder
from flowrl.run.restarts import current_policy
from flowrl.run.results import SAVE_TIMEOUT_S, draw_plots, metric_titles, save_last_weights, show, write_trace
from flowrl.run.role_groups import Protections, group_arguments, start_scoring
from flowrl.run.rollout_rows import RolloutSaver
from flowrl.run.step_log import PeakMemory, RecordQueue, StepLog, check_logged
from flowrl.schedules.rewards import Scoring
from flowrl.schedules.rollout_source import PromptQueue, RolloutContext, RolloutSource
from flowrl.schedules.schedule_plan import trainer_routes
from flowrl.schedules.streaming_rollouts import make_rollout_source
from flowrl.weight_sync.transfer import WeightSync
from flowrl.weight_sync.verification import ComparedWeights

Parameters = ParamSpec("Parameters")

Summary = dict[str, Any]  # Any: the values of a JSON file
"""Entries of `summary.json`: the results of a run by name (docs/metrics.md)."""


class Run:
    """Starts the cluster, runs the steps of a recipe, and writes the run folder. Use it as a context manager.

    SIGINT (Ctrl-C) or SIGTERM ends the loop after the current step, and `finish` writes all results. A second signal
    aborts the run, and so does a signal before the first step.

    With `resume: auto`, the run continues from the newest checkpoint of the same config in the output folder.

    Raises:
        RunFolderError: if the output folder contains another run or is in use.
        CheckpointError: if the newest checkpoint is corrupt.
        RunComplete: if the output folder has this run with all its steps, and `resume` is auto.
        PlacementError: if the placement does not fit the devices.
        DataError: if the conversation template is invalid.
        Interrupted: if a signal ended the run. It is raised when the `with` block ends.
    """

    def __new__(cls, config: RunConfig) -> Self:
        return make_replayed_run(config) or super().__new__(cls)

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.started_s = time.monotonic()
        self.version = 0
        """Weight version that was sent to the rollout last. Version 0 is the initial model."""
        self.step = 0
        """Number of the current step, from 1; 0 before the first step."""
        self._is_in_loop = False
        self._complete_step: int | None = None
        """Newest step of `rollouts` whose calls are all submitted. None while those of the next one are."""
        self._stream: Lookahead | None = None
        """Batches of `batches`; None in a run with rollouts of its own schedule."""
        self._policy: WorkerGroup | None = None
        self._source: RolloutSource | None = None
        self._evaluations = EvaluationHistory()
        self._evaluated_step: int | None = None
        """Last step with an evaluation for which training has waited."""
        self._memory = PeakMemory()
        self._resumed: Checkpoint | None = None
        self._earlier = Trace()
        # Read now, because an invalid template would otherwise end the run when it saves the trained model.
        self._template = conversation_template(config)
        self._saver = Saver(Checkpoints(config.output), config.checkpoint, config.compared_by)

    def __enter__(self) -> Self:
        config = self.config
        # Plans first, so that an impossible placement creates no files.
        if config.address is None:
            plan_run(config)
        with ExitStack() as resources:
            resources.enter_context(folder_lock(config.output))
            self._resumed = find_checkpoint(config)
            self._progress = resources.enter_context(LiveProgress(config.steps))
            self._interruption = resources.enter_context(Interruption(self._progress.notify))
            self._restarts = restarts = current_policy()
            self._progress.notify(restarts.pop_message() or f"starting {', '.join(config.roles)} ({config.backend})")
            self._protections = Protections(self._progress.notify)
            # Runs after the cluster is closed, because workers may write until then.
            resources.callback(remove_temporary_files, config.output)
            resources.callback(Checkpoints(config.output).remove_unfinished)
            self._set_ray_log = resources.enter_context(log_to_file(RAY_LOGGER))
            self.cluster = resources.enter_context(restarts.cluster(config, self._start_cluster, self._interruption))
            self.cluster.notify = self._progress.notify
            self._interruption.install()  # with `address`, Ray has installed its own handlers
            check_engines(config, self.cluster.plan)
            self._applied = apply_devices(config, self.cluster.plan, self._progress.notify)
            self._checks = StepChecks(self._applied, self._progress.notify)
            self._weight_sync = WeightSync(self._applied, self.cluster.plan)
            self._open_folder(resources)
            self._resources = resources.pop_all()
        return self

    def _start_cluster(self) -> Cluster:
        config = self.config
        return Cluster(
            config.placement,
            backend=config.backend,
            address=config.address,
            devices=config.devices,
            roles=config.roles,
            dedicated=config.dedicated_roles(),
            num_threads=config.threads,
            prepare=("flowrl.run.advantages", "flowrl.workers"),
            call_timeout_s=config.call_timeout_s,
            start_timeout_s=config.start_timeout_s,
            deterministic=config.deterministic,
            notify=self._progress.notify,
        )

    def _open_folder(self, resources: ExitStack) -> None:
        config, checkpoint, notify = self.config, self._resumed, self._progress.notify
        resolved = config.model_dump(mode="json")
        self.folder = (RunFolder.reopen if is_resuming(config) else RunFolder.create)(config.output, resolved)
        self._set_ray_log(self.folder.ray_log)
        last_step = -1 if checkpoint is None else checkpoint.manifest.step
        trackers = open_trackers(config.report, TrackedRun(self.folder.path, resolved, last_step), notify)
        metrics = MetricsLog(self.folder.path, last_step, trackers=trackers, notify=notify)
        self._metrics = resources.enter_context(metrics)
        self._records = RecordQueue(self._write_metrics, self._add_evaluation)
        self._rollouts = RolloutSaver(config, self.folder.rollouts, last_step, self._metrics.write_rows)
        self._checks.open(self.folder.path, self.cluster.plan, self._metrics.history)
        elapsed_s = self._metrics.history[-1].get("elapsed_s", 0.0) if self._metrics.history else 0.0
        self._log = StepLog(self.cluster.calls, elapsed_s, config.report, self.folder.profiles)
        # Computed now, because a user may edit the files during the run.
        write_json(self.folder.inputs, {key: checksum._asdict() for key, checksum in self._input_checksums.items()})
        self._recorder = resources.enter_context(StepRecorder(config, self.cluster, self._saver, last_step))
        self._recorder.request_after_findings(self._checks.health)
        if checkpoint is not None:
            self._restore(checkpoint.driver())
            with suppress(TraceError):  # a killed process has not written a trace
                self._earlier = read_trace(self.folder.trace).up_to_save(checkpoint.manifest.saved_at_s)

    @overload
    def group(
        self, cls: Callable[Parameters, Worker[GroupType]], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> GroupType: ...

    @overload
    def group(
        self,
        role: str,
        cls: Callable[Parameters, Worker[GroupType]],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> GroupType: ...

    def group(self, *args: Any, **kwargs: Any) -> Any:  # Any: the arguments of the overloads
        """Starts the workers of a role on the devices of its placement, and returns their group.

        `group(Actor, config.actor)` calls `Actor(config.actor)` on each device. The role is the field of the run's
        config that contains this value. `group(role, cls, ...)` names the role instead.
        """
        args, kwargs = group_arguments(self.config, self._applied, args, kwargs)
        group = self.cluster.group(*args, **kwargs)
        self._protections.follow(group)
        return group

    def rewards(self) -> Scoring:
        """Starts the workers that score responses: those of `config.reward`, or of `config.environment`."""
        return start_scoring(self.config, self.group)

    # Steps.

    def rollouts(
        self, rollout: WorkerGroup, prompts: PromptStream, *, policy: WorkerGroup, reward: Scoring | None = None
    ) -> Iterator[Batch]:
        """Yields the batch of each step: the next prompts and their responses.

        The rollout generates with the weights of `policy`. `schedule` limits the staleness of the responses. Step k-1
        is complete before step k+1 is submitted, so the driver is at most one step ahead.

        With `reward` (`run.rewards`), the batch has `scores` and the other columns of the reward. Functions score a
        response while others are generated, and `dynamic_sampling` and `reward.on_failure: drop` select the rows.
        """
        config = self._applied
        if not isinstance(config, RolloutRunConfig):
            raise UserError(
                f"run.rollouts needs the settings of RolloutRunConfig, but {type(config).__name__} is no subclass: "
                "derive it from RolloutRunConfig, or iterate over run.batches and call rollout.generate"
            )
        queue = PromptQueue(prompts, config.samples_per_prompt)
        routes = trainer_routes(config, self.cluster.plan)
        context = RolloutContext(
            config, rollout, queue, self._weight_sync, self.cluster.calls, self._progress.notify, reward, routes
        )
        self._source = make_rollout_source(context)
        self._saver.add_buffer(self._source)
        self._policy = policy
        self._begin(rollout)
        self._complete_step, first_step, first_version = self.step, self.step + 1, self.version
        for step in self._steps():
            if self.version - first_version != step - first_step:
                raise UserError(
                    f"the recipe called run.sync_weights {self.version - first_version} times in "
                    f"{step - first_step} steps, but every step has one weight version: call it once at the end of "
                    "every step"
                )
            batch = self._source.next_batch(step, self.version).with_seed((config.seed, step))
            self._complete_step = None
            yield self._record(batch)
            self._complete_step = step

    def batches(self, stream: Iterable[Batch], *, policy: WorkerGroup) -> Iterator[Batch]:
        """Yields the batch of each step from a stream, until `steps` or the end of the stream.

        A resumed run skips the batches of the steps before its checkpoint. It calls `stream.skip(num_batches)` if the
        stream has this method, and draws the batches otherwise. `policy` is the group that is trained. The stream may
        generate its batches: the next one is drawn after the body of the loop, or by `due` and `save_checkpoint`, which
        need to know whether the step is the last one.
        """
        self._policy = policy
        self._begin()
        if isinstance(stream, Skippable):
            stream.skip(self.step)
        else:
            stream = islice(stream, self.step, None)
        self._stream = Lookahead(iter(stream))
        for step in self._steps():
            yield self._record(self._stream.pop().with_seed((self.config.seed, step)))

    def record_next_step(self) -> None:
        """Records the next step that begins, in addition to the steps in `record`, for `flowrl replay`."""
        self._recorder.request_next()

    def _record(self, batch: Batch) -> Batch:
        """Starts to record the current step if it is due. Returns the batch."""
        if self._recorder.is_due(self.step):
            self._wait_for_save()
            self._write_records(self.step - 1)
            self._recorder.begin(self.step, self.version, batch, self._input_checksums)
        return batch

    def _begin(self, rollout: WorkerGroup | None = None) -> None:
        """Restores the checkpoint, and sends its weights to the rollout."""
        self._saver.check(self._resumed)
        self._recorder.check()
        if rollout is not None and self._policy is not None:
            self._weight_sync.prepare(self._policy, rollout)
        if self._resumed is not None:
            warn_about_threads(self.config, self._resumed, self.cluster.count_threads(), self._progress.notify)
            self._saver.restore(self._resumed)
            if rollout is not None and self._policy is not None:
                self._checks.rollout.follow(self._weight_sync.send(self._policy, rollout, self.version))
        self.cluster.wait_for_calls()
        self._protections.report()
        if self._source is not None and rollout is not None:
            self._source.begin(self._policy, self.step, self.version)
            dedicated = rollout.role if self._source.is_streaming else None
            policy, roles = self._policy and self._policy.role, self.cluster.plan.roles
            self._log.measure_idleness(policy, roles, self._source.weight_wait_s, excluded_role=dedicated)
        self._log.reset_clock()

    def _steps(self) -> Iterator[int]:
        if initial := self._log.pop_initial():
            self._write_metrics(0, initial)
        self._is_in_loop = True
        try:
            while self.step < self.config.steps:
                if self.step > 1:
                    self._write_records(self.step - 1)
                self._checks.failures.check_responses(self.step)
                if self._interruption.signal is not None or self._checks.error is not None:
                    break  # `finish` writes the results
                if self._stream is not None and not self._stream.has_next():
                    break
                self.step += 1
                self._rollouts.begin_step(self.step, self.version)
                self._log.begin(self.step)
                self._defer_signals(f"finishing step {self.step} and saving", f"in step {self.step}")
                yield self.step
                self._end_step()
                if self._evaluated_step == self.step:
                    self._write_records(self.step)
        finally:  # the recipe may break its loop
            self._is_in_loop = False

    def _defer_signals(self, action: str, progress: str) -> None:
        """Makes the first signal end the run after the current step, because there are results to save."""
        self._interruption.defer(action, f"{progress} of {self.config.steps}; results: {self.folder.path}")

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Sends the actor's weights to the rollout as the next version. Does not block.

        For a rollout that uses the actor's weights, only the version changes.
        """
        self.version += 1
        sync = self._weight_sync.send if self._source is None else self._source.sync_weights
        with self._recorder.paused():
            self._log.add(self._checks.rollout.follow(sync(actor, rollout, self.version)))

    # Times of evaluations and checkpoints.

    def due(self, every: int | None) -> bool:
        """Returns whether an action with the period `every`, such as an evaluation, is due.

        It is due after each multiple of `every`, after the last step, and before the loop over steps. None: only before
        the loop and after the last step. 0: never. After a signal, nothing is due, so that the run ends quickly.

        In a step, call `due` after the training calls, because later calls do not count as part of the step's duration.
        """
        self._end_step()
        if every == 0 or self._interruption.signal is not None:
            return False
        if self.step == 0 or not self._is_in_loop:
            return self.step == 0  # before the loop
        return (every is not None and self.step % every == 0) or self._is_last

    def due_sets(self, held_out: Mapping[str, Batch]) -> dict[str, Batch]:
        """Returns the held-out sets whose evaluation is due (`evaluate_every`, `data.tests.NAME.every`), by name."""
        return {name: batch for name, batch in held_out.items() if self.due(self.config.evaluation_interval(name))}

    @property
    def _is_last(self) -> bool:
        """Whether no step follows the current one. Draws the next batch of a stream."""
        return self.step == self.config.steps or (self._stream is not None and not self._stream.has_next())

    # Checkpoints.

    def add_checkpointable(self, *parts: WorkerGroup | Checkpointable) -> None:
        """Adds worker groups, and driver objects with state, to checkpoints. A resumed run restores them.

        Raises UserError if a group's workers lack `save_checkpoint` or `load_checkpoint`.
        """
        groups = [part for part in parts if isinstance(part, WorkerGroup)]
        self._saver.add(
            groups, {type(part).__name__.lower(): part for part in parts if not isinstance(part, WorkerGroup)}
        )

    def save_checkpoint(self) -> None:
        """Starts a checkpoint of this step. Blocks in the last step, and if `checkpoint.asynchronous` is false.

        Call it after the other calls of the step.
        """
        self._end_step()
        self._wait_for_save()
        self._save(asynchronous=self.config.checkpoint.asynchronous and not self._is_last)

    def _save(self, *, asynchronous: bool) -> None:
        if self.step > self._saver.last_step:
            files = {} if self._template is None else {TEMPLATE_FILE: template_text(self._template).encode()}
            self._saver.begin(self.step, self._state(), files, asynchronous=asynchronous)
            if not asynchronous:
                self._wait_for_save()

    def _state(self) -> dict[str, Any]:
        """Returns the run's own state for a checkpoint, after the step that was submitted last."""
        return {
            "step": self.step,
            "version": self.version,
            "outcomes": self._evaluations.state(),
            "pending_evaluations": self._records.pending_evaluations,
            "peak_mb": self._memory.peak_mb,
            "seconds": time.monotonic() - self.started_s,
            "inputs": self._input_checksums,
            "threads": self.cluster.count_threads(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step, self.version = state["step"], state["version"]
        self._evaluations.restore(state["outcomes"], state.get("pending_evaluations", ()), self._metrics.history)
        self._memory.peak_mb = state["peak_mb"]
        self.started_s -= state["seconds"]
        self._progress.notify(f"resuming from step {self.step}")
        self._interruption.progress = f"after step {self.step} of {self.config.steps}; results: {self.folder.path}"

    @cached_property
    def _input_checksums(self) -> dict[str, FileChecksum]:
        return input_checksums(self.config)

    def _wait_for_save(self) -> None:
        if self._saver.pending_step is not None:
            self._write_records(self._saver.pending_step)
            self._records.flush(self._saver.pending_step)
            self._metrics.sync()
            self._saver.advance(self._metrics.history, wait=True)

    # Metrics.

    def log(self, *metrics: Logged) -> None:
        """Adds metrics, futures of metrics, or an `Evaluation` to the log record of this step. Does not block.

        Before the loop over steps, adds to the record of step 0, which a resumed run already has. Values with the same
        name are merged. NaN and infinity are recorded as null. Raises UserError if a value is not a number.
        """
        for logged in metrics:
            if isinstance(logged, PendingEvaluation) and self._is_in_loop:
                self._records.add_evaluation(self.step, logged)
                continue
            check_logged(logged)
            if self._resumed is not None and not self._log.has_begun:
                continue
            if isinstance(logged, Evaluation) and logged:
                self._write_records(self.step - 1)
                self._records.flush(self.step - 1)
                self._add_evaluation(self.step, logged)
                self._evaluated_step = self.step
            self._recorder.add_metrics((logged,))
            self._log.add((logged,))

    def _add_evaluation(self, step: int, result: Evaluation) -> None:
        self._evaluations.add(step, result)
        self._rollouts.add_evaluation(step, result.rows)
        self._progress.add_evaluation(step, result)
        self._checks.check_evaluation(step, result, result.rows)

    def save_rollouts(self, batch: Batch) -> None:
        """Saves rows of this step's batch in `rollouts/`, if the step is due (`report.rollouts`). Does not block.

        Call it after all scores and advantages are in the batch. A second call in the same step replaces the rows.
        Raises ColumnError if the batch lacks `prompt` or `response`, and UserError outside of the loop over steps.
        """
        if not self._is_in_loop:
            raise UserError("run.save_rollouts was called outside of the loop over steps: rows belong to a step")
        with self._recorder.paused():
            self._rollouts.save_training(batch, self._policy and self._policy.role)

    def _log_source(self) -> None:
        for metrics in () if self._source is None else self._source.pop_metrics():
            watch = self._checks.rollout if isinstance(metrics, ComparedWeights) else self._checks.failures
            self._log.add(watch.follow(metrics))  # pyright: ignore[reportArgumentType] (each follows its own type)

    def _write_records(self, last_step: int) -> None:
        for step in [step for step in self._log.unresolved if step <= last_step]:
            values = self._log.resolve(step)
            values["memory_mb"] = self._memory.measure_mb()
            if self._evaluated_step == step:
                self._log.reset_clock()
            self._records.add_record(step, values)
            self._recorder.commit(step, values)
            self._progress.update(step, values)
            self._checks.check_step(step, values)

    def _write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        # Written before the metrics, because a checkpoint is complete only after its step's metrics.
        self._rollouts.write_training(step)
        self._metrics.write(step, values)
        self._checks.health.check_step(step, values)

    def _end_step(self) -> None:
        """Ends the part of a step whose calls count for its duration."""
        if self._log.is_timed:
            self._log_source()
            self._log.end()
            self._recorder.end_calls()
            self._saver.advance(self._metrics.history)

    # The end.

    def save_model(self, group: WorkerGroup) -> None:
        """Saves the model of a group in the run folder, in the format of `save_pretrained`, and blocks."""
        self._end_step()
        with replacing(self.folder.model) as folder:
            group.save(folder.absolute())
            save_template(self._template, folder)

    def finish(self) -> Summary:
        """Writes all results, prints the tables, and returns the summary.

        After a signal, it also saves a last checkpoint if checkpoints are enabled.
        """
        self._end_step()
        self._defer_signals("writing the results", f"after step {self.step}")
        self._checks.failures.check_responses(self.step)
        self._write_records(self.step)
        self._records.flush(self.step)
        if self._source is not None:
            self._source.finish()
        if self.config.checkpoint.every:
            self._wait_for_save()
            self._save(asynchronous=False)
        self._progress.close()
        self.cluster.wait_for_calls()
        self._write_trace_and_plots(self._log.last_ended_ns)
        write_json(self.folder.summary, summary := self._summary())
        self._metrics.finish(summary)
        if self._checks.error is not None:
            raise UserError(self._checks.error)
        if self._interruption.signal is None:
            show(self._progress.console, self._evaluations.results, self.folder, metric_titles(self.config))
        return summary

    def _write_trace_and_plots(self, until_ns: int | None = None, *, is_partial: bool = False) -> None:
        events, dropped_until_ns = list(self.cluster.calls.events), self._log.recorded.dropped_until_ns
        earlier = None if self._resumed is None else (self._earlier, self._resumed.manifest.step)
        counted = () if self._source is None else self._source.counted
        write_trace(self.folder, events, dropped_until_ns, earlier, counted)
        draw = partial(draw_plots, self.folder, self._metrics.history, events, until_ns)
        if self.config.report.plots:
            # A restart does not wait for the plots of the failed attempt.
            self._restarts.draw_at_end(draw) if is_partial else draw()

    def _summary(self) -> Summary:
        signal = self._interruption.signal
        run = {
            "steps": int(self._metrics.history[-1]["step"]) if self._metrics.history else 0,
            "busy_fraction": self._log.recorded.busy_fractions(),
            "steps_requested": self.config.steps,
            "interrupted_by": None if signal is None else signal.name,
            "stopped_by": self._checks.error,
            "restarts": self._restarts.num_restarts,
            "seconds": time.monotonic() - self.started_s,
            "rollout_gap_steps": self._checks.rollout.gap_steps,
            "health": self._checks.health.summary(),
            "missing_protections": {role: list(names) for role, names in self._protections.missing.items()},
            "peak_memory_mb": self._memory.measure_mb(is_required=True),
        }
        source = {} if self._source is None else self._source.summary()
        return run | self._evaluations.summary(self.step) | source

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._source is not None:
                self._source.detach()
            if isinstance(error, FlowError) and self.cluster.has_lost_nodes():
                self.cluster.close()  # now, because without its raylet, Ray ends this process when a result is freed
            if error is not None:
                self._records.drop_evaluations()
            if isinstance(error, UserError):
                if self.config.checkpoint.every == 0:
                    save_last_weights(self._policy, self.cluster, self.folder, self._template, self._metrics.history)
                elif self._complete_step is not None and self._complete_step > self._saver.last_step:
                    self._save_step(self._complete_step)
            if error is not None:
                self._write_partial_results(error)
        except OSError as lost:  # not raised, because the first error is reported
            if not isinstance(error, OSError):  # otherwise the cause is the same: a full disk or a lost folder
                self._progress.notify(f"the results in {self.folder.path} are incomplete: {lost}")
        finally:
            self._resources.__exit__(kind, error, trace)

    def _write_partial_results(self, error: BaseException) -> None:
        has_steps = self._resumed is not None or any(record["step"] for record in self._metrics.history)
        if has_steps or self._recorder.keeps_step(error):
            self._write_trace_and_plots(is_partial=True)
        else:
            self.folder.clear()  # there is no result yet, so the next attempt may use the same folder
            self._interruption.progress = "before the first step was complete; nothing was saved"

    def _save_step(self, step: int) -> None:
        """Saves a checkpoint of the newest complete step, after an error in the responses of the next one."""
        assert self._source is not None
        try:
            self._write_records(step)
            self.cluster.calls.abandon_all(SAVE_TIMEOUT_S, keeps_events=True)
            self._wait_for_save()
            self._source.requeue_prompts()
            self.step = step
            self._save(asynchronous=False)
            self._progress.notify(f"saved a checkpoint of step {step}, from which resume=auto continues the run")
        except (FlowError, UserError, TimeoutError) as error:
            self._progress.notify(f"step {step} could not be saved: {error}")
