"""The observers of a run, which receive the records of its steps in order, and the observer `StepChecks`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from flowrl.config import RunConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.metric import Logged
from flowrl.report.progress import MetricsLog
from flowrl.report.rollout_log import Row
from flowrl.report.run_observer import RunObserver
from flowrl.report.trackers.open_trackers import Trackers, open_trackers
from flowrl.report.trackers.tracker import TrackedRun
from flowrl.run.evaluation import Evaluation, EvaluationHistory, PendingEvaluation
from flowrl.run.monitoring.failure_watch import FailureWatch
from flowrl.run.monitoring.health_log import HealthLog
from flowrl.run.monitoring.step_log import PeakMemory, RecordQueue, StepLog, check_logged
from flowrl.run.replay.step_recorder import StepRecorder
from flowrl.run.results import ResultFiles
from flowrl.run.role_groups import PartialModels, Protections
from flowrl.run.rollout_rows import RolloutSaver
from flowrl.run.start import StartedRun
from flowrl.run.updates import ZeroRateWatch, describe_updates
from flowrl.schedules.rewards import reward_metrics
from flowrl.schedules.rollout_source import RolloutSource
from flowrl.weight_sync.verification import ComparedWeights, RolloutWatch


class StepChecks(RunObserver):
    """Checks each step for failures, the rollout gap and learning rates of 0. Reports the planned number of updates."""

    def __init__(self, config: RunConfig, notify: Callable[[str], None]) -> None:
        self.failures = FailureWatch(config, notify)
        self.rollout = RolloutWatch(config, notify)
        self._rates = ZeroRateWatch(config, notify)
        for message in describe_updates(config):
            notify(message)

    @property
    def stop_reason(self) -> str | None:
        return self.failures.error

    def evaluated(self, step: int, values: Mapping[str, float], rows: Sequence[Row], num_examples: int) -> None:
        self.failures.check_evaluation(f"of step {step}" if step else "of the initial model", values, rows)

    def calls_done(self, step: int, values: Mapping[str, float]) -> None:
        """Raises CheckFailed if the rollout gap is too large and `rollout.check` is strict."""
        self._rates.check_step(step, values)
        self.failures.check_step(step, values)
        self.rollout.check_step(step, values)


class RunObservers:
    """Collects the metrics of each step, and passes the events of a run to its observers.

    The driver runs ahead of the workers, so the record of a step is complete when its calls and its evaluations are
    done. `write` waits for the calls, and `settle` also for the evaluations.
    """

    def __init__(self, started: StartedRun, resources: ExitStack) -> None:
        """Opens the run's files, which `resources` closes. A resumed run removes records of steps that it repeats."""
        config, folder, cluster, notify = started.config, started.folder, started.cluster, started.progress.notify
        last_step = -1 if started.resumed is None else started.resumed.manifest.step
        tracked = TrackedRun(folder.path, config.model_dump(mode="json"), last_step)
        trackers = resources.enter_context(Trackers(open_trackers(config.report, tracked, notify)))
        metrics = resources.enter_context(MetricsLog(folder.path, last_step, notify=notify))
        self.history = metrics.history
        """The records of the steps so far."""
        earlier_s = self.history[-1].get("elapsed_s", 0.0) if self.history else 0.0
        self._roles = tuple(cluster.plan.roles)
        self._log = StepLog(cluster.calls, earlier_s, config.report, folder.profiles)
        self._results = ResultFiles(started, self._log)
        self.evaluations = EvaluationHistory()
        self.recorder = resources.enter_context(StepRecorder(config, cluster, started.saver, started.inputs, last_step))
        self.rollouts = RolloutSaver(config, folder.rollouts, last_step, trackers.write_rows)
        self._checks = StepChecks(started.applied, notify)
        self._health = HealthLog(folder.path, config, cluster.plan, self.history, notify)
        self.recorder.request_after_findings(self._health)
        self.protections = Protections(notify)
        self.partial_models = PartialModels(notify)
        self.observers: Sequence[RunObserver] = (
            self._results,
            self.evaluations,
            self.recorder,
            self.rollouts,  # before the metrics, because a checkpoint needs the rows and then the metrics of its step
            metrics,
            trackers,
            started.progress,
            self._checks,
            self._health,
            self.protections,
            self.partial_models,
        )
        self._queue = RecordQueue(self._step_done, self._evaluated)
        self._evaluated_step: int | None = None
        """Last step for whose evaluation training has waited, or None."""
        self._is_resumed = started.resumed is not None
        """Whether `metrics.jsonl` already has the record of step 0."""
        self._memory = PeakMemory()

    # Events.

    def begin(self) -> None:
        """Reports to all observers that the workers have started."""
        for observer in self.observers:
            observer.begun()

    def reset_clock(self) -> None:
        """Excludes the time until now from the duration of the first step."""
        self._log.reset_clock()

    def begin_step(self, step: int) -> None:
        """Begins a step, although its batch may not be generated yet. Later calls and metrics belong to this step."""
        self._log.begin(step)

    def step_begun(self, step: int, version: int, batch: Batch) -> None:
        """Reports to all observers that the loop body of a step begins."""
        for observer in self.observers:
            observer.step_begun(step, version, batch)

    def log(self, step: int, logged: Logged, *, is_in_loop: bool) -> None:
        """Adds metrics, a future of metrics, or an `Evaluation` to the record of a step. Blocks only for a finished
        `Evaluation`, until the records of earlier steps are written.

        Before the loop over steps, adds to the record of step 0. A resumed run already has this record, so it drops the
        metrics. Raises UserError if a value is not a number.
        """
        if isinstance(logged, PendingEvaluation) and is_in_loop:
            self._queue.add_evaluation(step, logged)
            return
        check_logged(logged)
        if self._is_resumed and not self._log.has_begun:
            return
        if isinstance(logged, Evaluation) and logged:
            self.settle(step - 1)
            self._evaluated(step, logged)
            self._evaluated_step = step
        for observer in self.observers:
            observer.logged(logged)
        self._log.add((logged,))

    def follow_weights(self, compared: ComparedWeights | None) -> None:
        """Adds a comparison of weights to the current step, and checks the result later. None adds nothing."""
        self._log.add(self._checks.rollout.follow(compared))

    def watch_weights(self, compared: ComparedWeights | None) -> None:
        """Checks a comparison of weights before the first step of a resumed run, without adding it to a log record."""
        self._checks.rollout.follow(compared)

    def end_calls(self, source: RolloutSource | None) -> bool:
        """Ends the part of a step in which calls count for the step's duration, and adds the metrics of `source`, if
        any. Returns False if this part has already ended.
        """
        if not self._log.is_timed:
            return False
        for metrics in () if source is None else source.pop_metrics():
            if isinstance(metrics, ComparedWeights):
                self.follow_weights(metrics)
            else:
                self._log.add(self._checks.failures.follow(metrics))
        self._log.end()
        self.recorder.end_calls()
        return True

    def measure_rewards(self, scored: Batch) -> None:
        """Measures the rewards of a batch that the recipe has scored itself. Does not block.

        The metrics are added to the record of the current step, and failed rewards count for `max_failure_rate`. Does
        nothing before the first step, or after `end_calls` until the next step begins.
        """
        if not self._log.is_timed:
            return
        with self.recorder.paused():
            for metrics in reward_metrics([scored]):
                self._log.add(self._checks.failures.follow(metrics))

    def check_responses(self, step: int) -> None:
        """Waits for the scores of a step, and checks the number of failed scores."""
        self._checks.failures.check_responses(step)

    def measure_idleness(self, policy: str, rollout: str, source: RolloutSource) -> None:
        """Adds idle times of the roles to the metrics of later steps, and the counters of `source` to the trace."""
        # A rollout that generates continuously belongs to no step.
        excluded = rollout if source.is_streaming else None
        self._log.measure_idleness(policy, self._roles, source.weight_wait_s, excluded_role=excluded)
        self._results.counted = lambda: source.counted

    def write_initial(self) -> None:
        """Writes the metrics that were logged before the first step, if there are any."""
        if initial := self._log.pop_initial():
            self._step_done(0, initial)

    def write(self, last_step: int) -> None:
        """Waits for the calls of the steps up to `last_step`, and queues the records of these steps. A record is
        written when the evaluations of its step are done.
        """
        for step in [step for step in self._log.unresolved if step <= last_step]:
            values = self._log.resolve(step)
            values["memory_mb"] = self._memory.measure_mb()
            if self._evaluated_step == step:
                self._log.reset_clock()
            # The record is queued before the checks, so that the record of a rejected step is also written.
            self._queue.add_record(step, values)
            for observer in self.observers:
                observer.calls_done(step, values)

    def write_evaluated(self, step: int) -> None:
        """If training has waited for a step's evaluation, writes the step's record, and restarts the clock for the next
        step.
        """
        if self._evaluated_step == step:
            self.write(step)

    def settle(self, last_step: int) -> None:
        """Waits for the calls and the evaluations of the steps up to `last_step`, and writes their records."""
        self.write(last_step)
        self._queue.flush(last_step)

    def drop_evaluations(self) -> None:
        """After an error, writes the records without the evaluations that still run."""
        self._queue.drop_evaluations()

    @property
    def stop_reason(self) -> str | None:
        """Why the run must end after the current step, or None."""
        return next((reason for observer in self.observers if (reason := observer.stop_reason) is not None), None)

    def saved(self, step: int) -> None:
        """Reports to all observers that a checkpoint is about to become complete."""
        for observer in self.observers:
            observer.saved(step)

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Reports to all observers that all steps and evaluations are done."""
        for observer in self.observers:
            observer.ended(summary)

    def write_partial_results(self, error: BaseException, started: StartedRun) -> None:
        """Writes the trace after an error. If the run has no trained or recorded step, empties its folder instead."""
        has_steps = started.resumed is not None or any(record["step"] for record in self.history)
        if has_steps or self.recorder.keeps_step(error):
            self._results.write_trace()
        else:
            started.folder.clear()  # there is no result yet, so the next attempt may use the same folder
            started.interruption.progress = "before the first step was complete; nothing was saved"

    def _evaluated(self, step: int, evaluation: Evaluation) -> None:
        for observer in self.observers:
            observer.evaluated(step, evaluation, evaluation.rows, evaluation.num_rows)

    def _step_done(self, step: int, values: Mapping[str, float]) -> None:
        for observer in self.observers:
            observer.step_done(step, values)

    # State and results.

    def state(self) -> dict[str, Any]:  # Any: plain values
        """Returns the state for a checkpoint after the last submitted step."""
        return {
            "outcomes": self.evaluations.state(),
            "pending_evaluations": self._queue.pending_evaluations,
            "peak_mb": self._memory.peak_mb,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.evaluations.restore(state["outcomes"], state.get("pending_evaluations", ()), self.history)
        self._memory.peak_mb = state["peak_mb"]

    def summary(self, step: int) -> dict[str, Any]:  # Any: values of JSON
        """Returns the entries of `summary.json` that observers have measured. `step` is the last step."""
        return {
            "steps": int(self.history[-1]["step"]) if self.history else 0,
            "busy_fraction": self._log.recorded.busy_fractions(),
            "stopped_by": self.stop_reason,
            "rollout_gap_steps": self._checks.rollout.gap_steps,
            "health": self._health.summary(),
            "missing_protections": {role: list(names) for role, names in self.protections.missing.items()},
            "weight_differences": self.partial_models.differences,
            "peak_memory_mb": self._memory.measure_mb(is_required=True),
        } | self.evaluations.summary(step)
