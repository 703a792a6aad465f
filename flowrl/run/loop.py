"""Run: what surrounds a recipe's loop. Its groups, its steps, its metrics, its evaluation, its folder."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from itertools import islice
from types import TracebackType
from typing import Any, Self

from flowrl.checkpoints.checkpoints import Checkpoint, Checkpoints
from flowrl.checkpoints.folder_lock import folder_lock
from flowrl.checkpoints.input_checksums import input_checksums
from flowrl.checkpoints.resume import found, is_resuming
from flowrl.checkpoints.run_folder import RunFolder, remove_unfinished, replacing, write_json
from flowrl.checkpoints.saver import Checkpointable, Saver
from flowrl.config import OnPolicyConfig, RunConfig
from flowrl.controller.cluster import Cluster
from flowrl.controller.group import WorkerGroup
from flowrl.controller.worker import Worker
from flowrl.data.batch.batch import Batch
from flowrl.data.checksums import FileChecksum
from flowrl.data.metric import Logged
from flowrl.data.prompts import PromptStream
from flowrl.memory.process_memory import resident_mb
from flowrl.report.chrome_trace import Trace, TraceError, read_trace
from flowrl.report.metrics_log import MetricsLog
from flowrl.report.progress import LiveProgress
from flowrl.run.evaluation import Evaluation, Evaluations
from flowrl.run.interrupt import Interruption
from flowrl.run.preflight import check_engines, plan_run
from flowrl.run.restarts import attempt
from flowrl.run.results import draw_plots, show, summary_of, write_trace
from flowrl.run.step_log import StepLog
from flowrl.schedules.rollout_source import PromptQueue, RolloutContext, RolloutSource
from flowrl.schedules.schedule_check import lanes_of
from flowrl.schedules.streaming_rollouts import rollout_source_of
from flowrl.weight_sync.sync import WeightSync
from flowrl.weight_sync.verification import ComparedWeights, RolloutWatch


class Run:
    """Makes the run folder, starts the cluster, and leaves the results. Use it as a context manager.

    Ctrl-C or SIGTERM ends the loop after the step in progress, and `finish` then leaves the results without a last
    evaluation; a second one ends the run where it stands, and so does one that comes before the first step.

    With `resume: auto` and a run of this config in the output folder it goes on after that run's newest checkpoint.

    Raises:
        RunFolderError: the output folder is another run's, or another run is in it now.
        CheckpointError: the newest checkpoint in it is damaged.
        PlacementError: the placement does not fit the devices.
        Interrupted: on leaving, where the run was asked to end.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.started_s = time.monotonic()
        self.version = 0
        """Version of the weights that were published last; 0 is what the model starts from."""
        self._step = 0
        self._policy: WorkerGroup | None = None
        self._makers: RolloutSource | None = None
        self._evaluations = Evaluations()
        self._peak_mb = 0.0
        self._resumed: Checkpoint | None = None
        self._earlier = Trace()
        self._saver = Saver(Checkpoints(config.output), config.checkpoint, config.compared_by)

    def __enter__(self) -> Self:
        config = self.config
        # Planned before anything is made: a placement that cannot be leaves nothing behind.
        if config.address is None:
            plan_run(config)
        with ExitStack() as made:
            made.enter_context(folder_lock(config.output))
            self._resumed = found(config)
            self._progress = made.enter_context(LiveProgress(config.steps))
            self._interruption = made.enter_context(Interruption(self._progress.say))
            attempts = attempt()
            self._progress.say(attempts.said() or f"starting {', '.join(type(config).roles)} ({config.backend})")
            self._watch = RolloutWatch(config, self._progress.say)
            # Once the processes that write there are gone.
            made.callback(remove_unfinished, config.output)
            made.callback(Checkpoints(config.output).remove_unfinished)
            self.cluster = made.enter_context(attempts.cluster(config, self._cluster, self._interruption))
            self.cluster.say = self._progress.say
            self._interruption.take()  # Ray has set handlers of its own
            check_engines(config, self.cluster.plan)
            self._weight_sync = WeightSync(config, self.cluster.plan)
            self._open_folder(made)
            self._made = made.pop_all()
        return self

    def _open_folder(self, made: ExitStack) -> None:
        config, checkpoint = self.config, self._resumed
        resolved = config.model_dump(mode="json")
        self.folder = (RunFolder.reopen if is_resuming(config) else RunFolder.create)(config.output, resolved)
        last_step = -1 if checkpoint is None else checkpoint.manifest.step
        self._metrics = made.enter_context(
            MetricsLog(self.folder.path, last_step, has_tensorboard=config.report.tensorboard)
        )
        elapsed_s = self._metrics.history[-1].get("elapsed_s", 0.0) if self._metrics.history else 0.0
        self._log = StepLog(self.cluster.calls, elapsed_s)
        if checkpoint is not None:
            self._take(checkpoint.driver())
            with suppress(TraceError):  # a process that was killed has left none, and it is none that a run needs
                self._earlier = read_trace(self.folder.trace).up_to_save(checkpoint.manifest.saved_at_s)

    def _take(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `_state` gave."""
        self._step, self.version = state["step"], state["version"]
        self._evaluations.restore(state["outcomes"])
        self._peak_mb = state["peak_mb"]
        self.started_s -= state["seconds"]
        self._progress.say(f"going on after step {self._step}")
        self._interruption.left = f"after step {self._step} of {self.config.steps}; results: {self.folder.path}"

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the run, as it is after the step that was submitted last."""
        return {
            "step": self._step,
            "version": self.version,
            "outcomes": self._evaluations.state(),
            "peak_mb": self._peak_mb,
            "seconds": time.monotonic() - self.started_s,
            "inputs": self._inputs,
        }

    @cached_property
    def _inputs(self) -> dict[str, FileChecksum]:
        """What the run reads that a checkpoint does not hold."""
        return input_checksums(self.config)

    def _cluster(self) -> Cluster:
        config = self.config
        return Cluster(
            config.placement,
            backend=config.backend,
            address=config.address,
            devices=config.devices,
            roles=type(config).roles,
            apart=config.apart(),
            num_threads=config.threads,
            prepare=("flowrl.run.advantages",),
            call_timeout_s=config.call_timeout_s,
            say=self._progress.say,
        )

    def group(self, role: str, cls: type[Worker], *args: Any, **kwargs: Any) -> WorkerGroup:
        """Makes a role's workers where the placement says."""
        return self.cluster.group(role, cls, *args, **kwargs)

    def keep(self, policy: WorkerGroup, *others: WorkerGroup, **objects: Checkpointable) -> None:
        """Says what checkpoints hold, beside what the run itself has.

        Args:
            policy: whose weights the rollout samples from.
            others: groups that hold what training goes on from.
            objects: what the driver holds, by name: with `state()`, plain values, and `restore(state)`.
        Raises:
            UserError: a group's workers have no `save_checkpoint` and `load_checkpoint`.
        """
        self._saver.keep([policy, *others], objects)
        self._policy = policy

    # Steps.

    def rollouts(self, rollout: WorkerGroup, prompts: PromptStream) -> Iterator[tuple[int, Batch]]:
        """Step numbers from 1, each with the next prompts and responses to them, which are as old as `schedule` allows.

        Resolves step k-1 before it submits step k+1, so the driver runs ahead by one step at most.
        """
        config = self.config
        assert isinstance(config, OnPolicyConfig)
        draws = PromptQueue(prompts, config.samples_per_prompt)
        lanes = lanes_of(config, self.cluster.plan)
        setting = RolloutContext(
            config, rollout, draws, self._weight_sync, self.cluster.calls, self._progress.say, lanes
        )
        self._makers = rollout_source_of(setting)
        self._saver.keep_pending_rollouts(self._makers)
        self._begin(rollout)
        for step in self._steps():
            yield step, self._makers.batch(step, self.version)

    def batches(self, stream: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
        """Step numbers from 1, each with the stream's next batch; ends after `steps`, or with the stream.

        A run that goes on draws, and drops, the batches of the steps that are done.
        """
        self._begin()
        for batch, step in zip(islice(stream, self._step, None), self._steps(), strict=False):
            yield step, batch

    def _begin(self, rollout: WorkerGroup | None = None) -> None:
        """Brings everything to where the first step of this process begins."""
        self._saver.check(self._resumed)
        if rollout is not None and self._policy is not None:
            self._weight_sync.prepare(self._policy, rollout)
        if self._resumed is not None:
            self._saver.restore(self._resumed)
            if rollout is not None and self._policy is not None:
                self._watch.follow(self._weight_sync.send(self._policy, rollout, self.version))
        self.cluster.settle()
        if self._resumed is None:
            self._evaluate_untrained()
        if self._makers is not None and rollout is not None:
            self._makers.begin(self._policy, self._step, self.version)
            apart = rollout.role if self._makers.streams else None
            policy, roles = self._policy and self._policy.role, self.cluster.plan.roles
            self._log.follow(policy, roles, self._makers.waited_s, apart=apart)
        self._log.pause()

    def _evaluate_untrained(self) -> None:
        if self._evaluations.rows:
            self._progress.say(f"evaluating {self._evaluations.rows} held-out rows before training")
        self._evaluate()
        if self._evaluations.outcomes:
            self._metrics.write(0, {"accuracy": self._evaluations.outcomes[-1].accuracy})

    def _steps(self) -> Iterator[int]:
        while self._step < self.config.steps:
            if self._step > 1:
                self._write_line(self._step - 1)
            if self._interruption.signal is not None:
                return  # to `finish`, which keeps what there is
            self._step += 1
            self._log.begin(self._step)
            self._hold(f"stopping after step {self._step}", f"in step {self._step}")
            yield self._step
            self._log_makers()
            self._log.end()
            every = self.config.evaluate_every
            if every and self._step % every == 0:
                self._write_lines_and_evaluate()
            self._save()

    def _hold(self, doing: str, where: str) -> None:
        """From here on there is something to keep, so that the first Ctrl-C waits for the next good place to end."""
        self._interruption.hold(doing, f"{where} of {self.config.steps}; results: {self.folder.path}")

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Gives the actor's weights to the rollout as the next version. Does not wait.

        In the same processes the rollout samples from the actor's own weights, and only their number changes.
        """
        self.version += 1
        sync = self._weight_sync.send if self._makers is None else self._makers.sync_weights
        self._log.add(self._watch.follow(sync(actor, rollout, self.version)))

    # Checkpoints.

    def _save(self) -> None:
        """Begins the checkpoint that is due after this step, and ends those that are written."""
        if not self._saver.is_due(self._step) or self._step == self.config.steps:
            self._saver.advance(self._metrics.history)
            return  # the last step's is saved with its evaluation, by `finish`
        self._end_saving()
        asynchronous = self.config.checkpoint.asynchronous
        self._saver.begin(self._step, self._state(), asynchronous=asynchronous)
        if not asynchronous:
            self._end_saving()

    def _end_saving(self) -> None:
        """Waits until the checkpoint that was begun exists."""
        if self._saver.waits_for is not None:
            self._write_lines(self._saver.waits_for)
            self._metrics.sync()
            self._saver.advance(self._metrics.history, wait=True)

    def _save_last(self) -> None:
        self._end_saving()
        if self.config.checkpoint.every and self._step > self._saver.last_step:
            self._saver.begin(self._step, self._state(), asynchronous=False)
            self._end_saving()

    # Metrics.

    def log(self, *metrics: Logged) -> None:
        """Adds metrics to this step's line. Does not wait; several values of one name are merged.

        Raises `RuntimeError` outside of the loop over steps.
        """
        self._log.add(metrics)

    def _log_makers(self) -> None:
        for each in () if self._makers is None else self._makers.logged():
            self._log.add(self._watch.follow(each) if isinstance(each, ComparedWeights) else (each,))

    def _write_lines_and_evaluate(self) -> None:
        """Brings everything up to the last step that was begun."""
        self._write_lines(self._step - 1)
        self._evaluate()
        self._write_lines(self._step)

    def _write_lines(self, last_step: int) -> None:
        for step in self._log.unresolved:
            if step <= last_step:
                self._write_line(step)

    def _write_line(self, step: int) -> None:
        if step not in self._log.unresolved:
            return
        values = self._log.resolve(step)
        self._peak_mb = max(self._peak_mb, resident_mb())
        values["memory_mb"] = self._peak_mb
        if self._evaluations.are_of(step):
            values["accuracy"] = self._evaluations.outcomes[-1].accuracy
            self._log.pause()
        self._metrics.write(step, values)
        self._progress.update(step, values)
        self._watch.look(step, values)

    # Evaluation.

    def evaluate_with(self, rollout: WorkerGroup, reward: WorkerGroup, held_out: PromptStream | None) -> None:
        """Has greedy answers to held-out prompts scored: before the first step, every `evaluate_every`, at the end."""
        if held_out is not None:
            assert isinstance(self.config, OnPolicyConfig)
            rows = held_out.evaluation_rows(self.config.data.evaluation_rows)
            self._evaluations.use(Evaluation(rollout, reward, rows))

    def _evaluate(self) -> None:
        """Once per number of steps trained, and not when the run was asked to end."""
        if self._interruption.signal is not None or self._evaluations.are_of(self._step):
            return
        if self._makers is not None and self._evaluations.rows:
            self._makers.catch_up()
        self._evaluations.measure(self._step)

    # The end.

    def finish(self, actor: WorkerGroup) -> dict[str, Any]:
        """Evaluates, writes the model and every result, shows the tables, and returns the summary.

        A run that was asked to end is not evaluated: whoever waits for its end wants its results.
        """
        self._log.end()
        self._hold("stopping when the results are written", f"after step {self._step}")
        self._write_lines_and_evaluate()
        if self._makers is not None:
            self._makers.end()
        self._save_last()
        self._write_model(actor)
        self._progress.close()
        self.cluster.settle()
        self._draw(self._log.last_ended_ns)
        summary = self._summary()
        write_json(self.folder.summary, summary)
        if self._interruption.signal is None:
            show(self._progress.console, self._evaluations.outcomes, self.folder)
        return summary

    def _write_model(self, actor: WorkerGroup) -> None:
        """Writes what training can go on from, for a run that is over as for one that was asked to end."""
        with replacing(self.folder.model) as folder:
            actor.save(folder.absolute())

    def _draw(self, until_ns: int | None = None) -> None:
        events = list(self.cluster.calls.events)
        step = None if self._resumed is None else self._resumed.manifest.step
        trace = Trace(events) if step is None else self._earlier.followed_by(events, step)
        counted = () if self._makers is None else self._makers.counted
        write_trace(self.folder, trace.counted(counted))
        if self.config.report.plots:
            draw_plots(self.folder, self._metrics.history, events, until_ns)

    def _summary(self) -> dict[str, Any]:
        signal = self._interruption.signal
        self._peak_mb = max(self._peak_mb, resident_mb())
        told = {
            "steps_asked": self.config.steps,
            "interrupted_by": None if signal is None else signal.name,
            "restarts": attempt().made,
            "seconds": time.monotonic() - self.started_s,
            "rollout_gap_steps": self._watch.gap_steps,
            "peak_memory_mb": self._peak_mb,
        }
        found = self._evaluations.summary(self._step) | ({} if self._makers is None else self._makers.summary())
        return summary_of(self._metrics.history, self.cluster.calls.events) | told | found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._makers is not None:
                self._makers.leave()
            if error is not None:
                self._leave_early()
        except OSError as lost:  # what ended the run is what is told of it, and a full disk may be just that
            self._progress.say(f"the results of {self.folder.path} are not complete: {lost}")
        finally:
            self._made.__exit__(kind, error, trace)

    def _leave_early(self) -> None:
        if self._resumed is not None or any(line["step"] for line in self._metrics.history):
            # What happened up to a failure is what one wants to see of it.
            self._draw()
        else:
            # It failed before it had a result: the next try may use the same folder.
            self.folder.empty()
            self._interruption.left = "before a step was done; nothing was kept"
