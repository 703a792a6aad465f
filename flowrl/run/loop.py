"""Defines Run: the steps of a recipe, with weight syncs, evaluations and checkpoints."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, overload

from flowrl.checkpoints.saver import Checkpointable
from flowrl.config import RunConfig, TrainedConfig, UserError
from flowrl.controller.errors import FlowError
from flowrl.controller.group import WorkerGroup
from flowrl.controller.worker import GroupType, Worker
from flowrl.data.batch.batch import Batch
from flowrl.data.metric import Logged
from flowrl.data.prompts import PromptStream
from flowrl.run.datasets.row_batches import Lookahead, Skippable
from flowrl.run.monitoring.observers import RunObservers
from flowrl.run.results import SAVE_TIMEOUT_S, save_last_weights, save_weights, show
from flowrl.run.role_groups import group_arguments, start_scoring
from flowrl.run.start import make_source, start_run
from flowrl.schedules.rewards import Scoring
from flowrl.schedules.rollout_source import RolloutSource

Parameters = ParamSpec("Parameters")
Settings = TypeVar("Settings")

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
        self._evaluations: list[Callable[[], None]] = []
        """Functions that evaluate the held-out sets that are due."""
        with ExitStack() as resources:
            self._started = started = start_run(config, resources)
            self.cluster, self.folder, self._saver = started.cluster, started.folder, started.saver
            self._notify = started.progress.notify
            self._observers = RunObservers(started, resources)
            if started.resumed is not None:
                state = started.resumed.driver()
                self.step, self.version = state["step"], state["version"]
                self.started_s -= state["seconds"]
                self._observers.restore(state)
                started.report_resume(self.step)
            self._resources = resources.pop_all()

    def __enter__(self) -> Self:
        return self

    @overload
    def group(
        self,
        role: str,
        cls: Callable[Parameters, Worker[GroupType]],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> GroupType: ...

    @overload
    def group(
        self, role: str, cls: Callable[[Settings], Worker[GroupType]], settings: Settings | None, /
    ) -> GroupType | None: ...

    def group(self, role: str, cls: Any, /, *args: Any, **kwargs: Any) -> Any:  # Any: the arguments of the overloads
        """Starts the workers of a role on the devices of its placement, and returns their group.

        `group("actor", Actor, config.actor)` calls `Actor(config.actor)` on each device of the role `actor`. Null
        settings in `config.actor` are replaced by their values on these devices. Returns None if the field of the
        role is None, because the run then does not have the role.
        """
        applied = group_arguments(self.config, self._started.applied, role, args, kwargs)
        if applied is None:
            return None
        group = self.cluster.group(role, cls, *applied[0], **applied[1])
        self._observers.protections.follow(group)
        self._observers.partial_models.follow(group, self.config.role_settings.get(role))
        return group

    def rewards(self) -> Scoring:
        """Starts the workers that score responses: those of `config.reward`, or of `config.environment`.

        Pass the result to `rollouts`, or call its `score` in the loop over steps.
        """
        return start_scoring(self.config, self.group, self._observers.measure_rewards)

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
        self._source = source = make_source(self._started, rollout, prompts, reward)
        self._saver.add_buffer(source)
        self._policy = policy
        self._begin(rollout)
        self._complete_step, first_step, first_version = self.step, self.step + 1, self.version

        def draw() -> Batch:
            num_syncs, num_steps = self.version - first_version, self.step - first_step
            if num_syncs != num_steps:
                raise UserError(
                    f"the recipe called run.sync_weights {num_syncs} times in {num_steps} steps, but every step has "
                    "one weight version: call it once at the end of every step"
                )
            return source.next_batch(self.step, self.version)

        yield from self._steps(draw)

    def batches(self, stream: Iterable[Batch], *, policy: WorkerGroup) -> Iterator[Batch]:
        """Yields the batch of each step from a stream, until `steps` or the end of the stream.

        A resumed run skips the batches of the steps before its checkpoint. It calls `stream.skip(num_batches)` if the
        stream has this method, and draws the batches otherwise. `policy` is the group that is trained. The stream may
        generate its batches: the next one is drawn after the body of the loop, or by `due`, which needs to know whether
        the step is the last one.
        """
        self._policy = policy
        self._begin()
        if isinstance(stream, Skippable):
            stream.skip(self.step)
        else:
            stream = islice(stream, self.step, None)
        self._stream = Lookahead(iter(stream))
        yield from self._steps(self._stream.pop)

    def record_next_step(self) -> None:
        """Records the next step that begins, in addition to the steps in `record`, for `flowrl replay`."""
        self._observers.recorder.request_next()

    def _begin(self, rollout: WorkerGroup | None = None) -> None:
        """Restores the checkpoint, and sends the weights to the rollout if they are not those of the initial model."""
        resumed = self._started.resumed
        self._saver.check(resumed)
        self._observers.recorder.check()
        if rollout is not None and self._policy is not None:
            self._started.weight_sync.prepare(self._policy, rollout)
        if resumed is not None:
            self._started.warn_about_threads()
            self._saver.restore(resumed)
        if rollout is not None and self._policy is not None and (resumed is not None or self._has_quantized_base):
            self._observers.watch_weights(self._started.weight_sync.send(self._policy, rollout, self.version))
        self.cluster.wait_for_calls()
        self._observers.begin()
        if self._source is not None and self._policy is not None and rollout is not None:
            self._source.begin(self._policy, self.step, self.version)
            self._observers.measure_idleness(self._policy.role, rollout.role, self._source)
        self._observers.reset_clock()

    @property
    def _has_quantized_base(self) -> bool:
        """Whether the policy has other weights than the initial model, from which a rollout starts."""
        settings = None if self._policy is None else self.config.role_settings.get(self._policy.role)
        lora = settings.lora if isinstance(settings, TrainedConfig) else None
        return lora is not None and lora.base_quantization is not None

    def _steps(self, draw: Callable[[], Batch]) -> Iterator[Batch]:
        """Yields the batch of each step, which `draw` returns. After the loop body, evaluates and saves what is due."""
        observers = self._observers
        observers.write_initial()
        self._is_in_loop = True
        try:
            while self.step < self.config.steps:
                if self.step > 1:
                    observers.write(self.step - 1)
                observers.check_responses(self.step)
                if self._started.interruption.signal is not None or observers.stop_reason is not None:
                    break  # `finish` writes the results
                if self._stream is not None and not self._stream.has_next():
                    break
                self.step += 1
                observers.begin_step(self.step)
                self._started.defer_signals(f"finishing step {self.step} and saving", f"in step {self.step}")
                batch = draw().with_seed((self.config.seed, self.step))
                if observers.recorder.is_due(self.step):
                    self._wait_for_save()
                    observers.write(self.step - 1)
                observers.step_begun(self.step, self.version, batch)
                self._complete_step = None
                yield batch
                self._end_step()
                for evaluate_due in self._evaluations:
                    evaluate_due()
                self._complete_step = self.step
                # The last step is saved after the loop, so that a recipe can log results there.
                if self.due(self.config.checkpoint.every) and not self._is_last:
                    self._wait_for_save()
                    self._save(asynchronous=self.config.checkpoint.asynchronous)
                observers.write_evaluated(self.step)
        finally:  # the recipe may break its loop
            self._is_in_loop = False

    def sync_weights(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Sends the actor's weights to the rollout as the next version. Does not block.

        For a rollout that uses the actor's weights, only the version changes.
        """
        self.version += 1
        sync = self._started.weight_sync.send if self._source is None else self._source.sync_weights
        with self._observers.recorder.paused():
            self._observers.follow_weights(sync(actor, rollout, self.version))

    # Times of evaluations and checkpoints.

    def due(self, every: int | None) -> bool:
        """Returns whether an action with the period `every`, such as an evaluation, is due.

        It is due after each multiple of `every`, after the last step, and before the loop over steps. None: only before
        the loop and after the last step. 0: never. After a signal, nothing is due, so that the run ends quickly.

        In a step, call `due` after the training calls, because later calls do not count as part of the step's duration.
        """
        self._end_step()
        if every == 0 or self._started.interruption.signal is not None:
            return False
        if self.step == 0 or not self._is_in_loop:
            return self.step == 0  # before the loop
        return (every is not None and self.step % every == 0) or self._is_last

    def add_evaluation(
        self, held_out: Mapping[str, Batch], evaluate: Callable[[dict[str, Batch]], Mapping[str, float]]
    ) -> None:
        """Evaluates held-out sets before the first step and, after the loop body, in each step in which they are due.

        Call it before the loop over steps. `evaluate` receives the sets that are due, by name, and its result is
        logged. The period of a set is `evaluate_every` or `data.tests.NAME.every` (`due`).
        """

        def evaluate_due() -> None:
            every = self.config.evaluation_interval
            if sets := {name: batch for name, batch in held_out.items() if self.due(every(name))}:
                self.log(evaluate(sets))

        evaluate_due()
        self._evaluations.append(evaluate_due)

    @property
    def _is_last(self) -> bool:
        """Whether no step follows the current one. Draws the next batch of a stream."""
        return self.step == self.config.steps or (self._stream is not None and not self._stream.has_next())

    def _end_step(self) -> None:
        """Ends the part of a step whose calls count for its duration."""
        if self._observers.end_calls(self._source):
            self._saver.advance(self._observers.history, before_commit=self._observers.saved)

    # Checkpoints.

    def add_checkpointable(self, *parts: WorkerGroup | Checkpointable) -> None:
        """Adds worker groups, and driver objects with state, to checkpoints. A resumed run restores them.

        Raises UserError if a group's workers lack `save_checkpoint` or `load_checkpoint`.
        """
        groups = [part for part in parts if isinstance(part, WorkerGroup)]
        self._saver.add(
            groups, {type(part).__name__.lower(): part for part in parts if not isinstance(part, WorkerGroup)}
        )

    def _save(self, *, asynchronous: bool) -> None:
        if self.step > self._saver.last_step:
            state = {
                "step": self.step,
                "version": self.version,
                "seconds": time.monotonic() - self.started_s,
                "inputs": self._started.inputs,
                "threads": self.cluster.count_threads(),
                **self._observers.state(),
            }
            self._saver.begin(self.step, state, self._started.template_files(), asynchronous=asynchronous)
            if not asynchronous:
                self._wait_for_save()

    def _save_last_step(self) -> None:
        """Saves a checkpoint after the loop over steps, and blocks. Does nothing if checkpoints are disabled."""
        if self.config.checkpoint.every:
            self._wait_for_save()
            self._save(asynchronous=False)

    def _wait_for_save(self) -> None:
        if self._saver.pending_step is not None:
            self._observers.settle(self._saver.pending_step)
            self._saver.advance(self._observers.history, wait=True, before_commit=self._observers.saved)

    # Metrics and results.

    def log(self, *metrics: Logged) -> None:
        """Adds metrics, futures of metrics, or an `Evaluation` to the log record of this step. Does not block.

        Before the loop over steps, adds to the record of step 0, which a resumed run already has. Values with the same
        name are merged. NaN and infinity are recorded as null. Raises UserError if a value is not a number.
        """
        for logged in metrics:
            self._observers.log(self.step, logged, is_in_loop=self._is_in_loop)

    def save_rollouts(self, batch: Batch) -> None:
        """Saves rows of this step's batch in `rollouts/`, if the step is due (`report.rollouts`). Does not block.

        Call it after all scores and advantages are in the batch. A second call in the same step replaces the rows.
        Raises ColumnError if the batch lacks `prompt` or `response`, and UserError outside of the loop over steps.
        """
        if not self._is_in_loop:
            raise UserError("run.save_rollouts was called outside of the loop over steps: rows belong to a step")
        with self._observers.recorder.paused():
            self._observers.rollouts.save_training(batch, self._policy and self._policy.role)

    def save_model(self, group: WorkerGroup) -> None:
        """Saves the model of a group in the run folder, in the format of `save_pretrained`, and blocks.

        After the loop over steps, saves a checkpoint of the last step first, if checkpoints are enabled. A run that
        fails later then resumes from this step.
        """
        self._end_step()
        if self._policy is not None and not self._is_in_loop:
            self._save_last_step()
        save_weights(group, self._started)

    def finish(self) -> Summary:
        """Writes all results, prints the tables, and returns the summary.

        Saves a checkpoint of the last step if checkpoints are enabled and `save_model` has not saved it.
        """
        self._end_step()
        self._started.defer_signals("writing the results", f"after step {self.step}")
        self._observers.check_responses(self.step)
        self._observers.settle(self.step)
        if self._source is not None:
            self._source.finish()
        self._save_last_step()
        self._started.progress.close()
        self.cluster.wait_for_calls()
        signal = self._started.interruption.signal
        source = {} if self._source is None else self._source.summary()
        summary: Summary = {
            "steps_requested": self.config.steps,
            "interrupted_by": None if signal is None else signal.name,
            "restarts": self._started.restarts.num_restarts,
            "seconds": time.monotonic() - self.started_s,
            **self._observers.summary(self.step),
            **source,
        }
        self._observers.ended(summary)
        if (reason := self._observers.stop_reason) is not None:
            raise UserError(reason)
        if signal is None:
            show(self._started.progress.console, self._observers.evaluations.results, self.folder, self.config)
        return summary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._source is not None:
                self._source.detach()
            if isinstance(error, FlowError) and self.cluster.has_lost_nodes():
                self.cluster.close()  # now, because without its raylet, Ray ends this process when a result is freed
            if error is not None:
                self._observers.drop_evaluations()
            if isinstance(error, UserError):
                self._save_valid_steps()
            if error is not None:
                self._observers.write_partial_results(error, self._started)
        except OSError as lost:  # not raised, because the first error is reported
            if not isinstance(error, OSError):  # otherwise the cause is the same: a full disk or a lost folder
                self._notify(f"the results in {self.folder.path} are incomplete: {lost}")
        finally:
            self._resources.__exit__(kind, error, trace)

    def _save_valid_steps(self) -> None:
        """Saves the newest complete step, after invalid input in the next one, such as its responses."""
        step, observers = self._complete_step, self._observers
        if self.config.checkpoint.every == 0:
            save_last_weights(self._policy, self._started, observers.history)
        elif self._source is not None and step is not None and step > self._saver.last_step:
            try:
                observers.write(step)
                self.cluster.calls.abandon_all(SAVE_TIMEOUT_S, keeps_events=True)
                self._wait_for_save()
                self._source.requeue_prompts()
                self.step = step
                self._save(asynchronous=False)
                self._notify(f"saved a checkpoint of step {step}, from which resume=auto continues the run")
            except (FlowError, UserError, TimeoutError) as error:
                self._notify(f"step {step} could not be saved: {error}")


StartRun = Callable[[Any], Run]  # Any: the config class of a recipe
"""Function that starts the run of a config: `Run`, or the function that `flowrl replay` passes to a recipe."""
