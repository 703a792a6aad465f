"""Run: what surrounds a recipe's loop. Its groups, its steps, its metrics, its evaluation, its folder."""

import shutil
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol, Self

from flowrl.config import OnPolicyConfig, RunConfig
from flowrl.controller.calls import CallRecord
from flowrl.controller.cluster import Cluster
from flowrl.controller.group import WorkerGroup
from flowrl.controller.worker import Worker
from flowrl.data.batch import Batch
from flowrl.data.metric import Metric, merge_metrics
from flowrl.data.prompts import PromptStream
from flowrl.run.curves import draw_curves
from flowrl.run.display import LiveProgress, before_after_table, completions_table
from flowrl.run.evaluate import Evaluation, Outcome
from flowrl.run.folder import RunFolder, replacing, write_json
from flowrl.run.memory import resident_mb
from flowrl.run.metrics import MetricsLog
from flowrl.run.start import plan_run
from flowrl.run.timeline import busy_fractions, chrome_trace, draw_timeline

_STARTING = ("__init__", "prepare")
"""Calls that belong to the start of a run, not to its loop."""


_DRAWN_STEPS = 4
"""Steps that `timeline.png` shows; `trace.json` has all."""


class MetricFuture(Protocol):
    """What `Run.log` takes: a future of a dictionary of metrics."""

    def get(self) -> dict[str, Metric]: ...


class Run:
    """Makes the run folder, starts the cluster, and leaves the results. Use it as a context manager.

    Raises:
        RunFolderError: the output folder is another run's.
        PlacementError: the placement does not fit the devices.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.started_s = time.monotonic()
        self.started_ns = time.time_ns()
        self.version = 0
        """Version of the weights that were published last; 0 is what the model starts from."""
        self._evaluation: Evaluation | None = None
        self._outcomes: list[Outcome] = []
        self._futures: dict[int, list[MetricFuture]] = {}
        self._submitted: dict[int, list[CallRecord]] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self._step = 0
        self._step_ended_ns = self.started_ns
        self._peak_mb = 0.0

    def __enter__(self) -> Self:
        config = self.config
        # Planned before anything is made: a placement that cannot be leaves nothing behind.
        if config.address is None:
            plan_run(config)
        self.cluster = Cluster(
            config.placement,
            backend=config.backend,
            address=config.address,
            devices=config.devices,
            roles=type(config).roles,
            num_threads=config.threads,
            prepare=("flowrl.run.estimate",),
        )
        try:
            self.folder = RunFolder.create(config.output, config.model_dump(mode="json"))
            self._metrics = MetricsLog(self.folder.path)
        except BaseException:
            self.cluster.close()
            raise
        self._progress = LiveProgress(config.steps)
        return self

    def group(self, role: str, cls: type[Worker], *args: Any, **kwargs: Any) -> WorkerGroup:
        """Makes a role's workers where the placement says."""
        return self.cluster.group(role, cls, *args, **kwargs)

    # Steps.

    def rollouts(self, rollout: WorkerGroup, prompts: PromptStream) -> Iterator[tuple[int, Batch]]:
        """Step numbers from 1, each with responses to the next prompts, sampled from the last published weights.

        Resolves step k-1 before it submits step k+1, so the driver runs ahead by one step at most.
        """
        config = self.config
        assert isinstance(config, OnPolicyConfig)
        for step in self._steps():
            rows = prompts.take(config.prompts_per_step)
            batch = Batch.from_rows(rows).repeat(config.samples_per_prompt)
            batch["sample"] = Batch.from_rows([{"sample": i} for _ in rows for i in range(config.samples_per_prompt)])
            yield step, batch.union(rollout.generate.submit(batch))

    def batches(self, stream: Iterator[Batch]) -> Iterator[tuple[int, Batch]]:
        """Step numbers from 1, each with the stream's next batch; ends after `steps`, or with the stream."""
        yield from zip(self._steps(), stream, strict=False)

    def _steps(self) -> Iterator[int]:
        self.cluster.settle()
        self._evaluate(0)
        if self._outcomes:
            self._metrics.write(0, {"accuracy": self._outcomes[-1].accuracy})
        self._step_ended_ns = time.time_ns()
        for step in range(1, self.config.steps + 1):
            if step > 2:
                self._resolve(step - 2)
            self._step = step
            begun_ns = time.time_ns()
            yield step
            self._submitted[step] = self.cluster.calls.pending()
            self._spans[step] = (begun_ns, time.time_ns())
            every = self.config.evaluate_every
            if step == self.config.steps or (every and step % every == 0):
                self._resolve(step - 1)
                self._evaluate(step)
                self._resolve(step)
        self._resolve_all()

    def publish(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Gives the actor's weights to the rollout as the next version. Does not wait.

        In one process the rollout samples from the actor's own weights, and only their number changes.
        """
        self.version += 1
        if rollout.shares_processes_with(actor):
            rollout.set_version.submit(self.version)
        else:
            rollout.load_weights.submit(actor.weights.submit(), self.version)

    # Metrics.

    def log(self, *metrics: MetricFuture) -> None:
        """Adds metrics to this step's line. Does not wait; several values of one name are merged."""
        self._futures.setdefault(self._step, []).extend(metrics)

    def _resolve_all(self) -> None:
        for step in sorted({*self._futures, *self._submitted}):
            self._resolve(step)

    def _resolve(self, step: int) -> None:
        """Waits until a step is done in every group, and writes its line."""
        futures, calls = self._futures.pop(step, None), self._submitted.pop(step, None)
        if futures is None and calls is None:
            return
        merged = merge_metrics([future.get() for future in futures or []])
        self.cluster.calls.settle(calls or [], None)
        values = {name: metric.result() for name, metric in merged.items()}
        values["seconds"] = self._step_seconds(step)
        values["elapsed_s"] = time.monotonic() - self.started_s
        if "response_tokens" in values:
            values["tokens_per_s"] = values["response_tokens"] / values["seconds"]
        self._peak_mb = max(self._peak_mb, resident_mb())
        values["memory_mb"] = self._peak_mb
        if self._outcomes and self._outcomes[-1].step == step:
            values["accuracy"] = self._outcomes[-1].accuracy
            # The evaluation is not the next step's time: tokens per second are those of training.
            self._step_ended_ns = time.time_ns()
        self._metrics.write(step, values)
        self._progress.update(step, values)

    def _step_seconds(self, step: int) -> float:
        """From the end of the step before to the end of this one's last call, wherever the driver stands meanwhile."""
        begun_ns, submitted_ns = self._spans.pop(step)
        own = [e.ended_ns for e in self.cluster.calls.events if begun_ns <= e.submitted_ns <= submitted_ns]
        ended_ns = max(own, default=submitted_ns)
        seconds = (ended_ns - self._step_ended_ns) / 1e9
        self._step_ended_ns = ended_ns
        return seconds

    # Evaluation.

    def evaluate_with(self, rollout: WorkerGroup, reward: WorkerGroup, held_out: PromptStream | None) -> None:
        """Has greedy answers to held-out prompts scored: before the first step, every `evaluate_every`, at the end."""
        if held_out is not None:
            assert isinstance(self.config, OnPolicyConfig)
            rows = held_out.evaluation_rows(self.config.data.evaluation_rows)
            self._evaluation = Evaluation(rollout, reward, rows)

    def _evaluate(self, step: int) -> None:
        if self._evaluation is None:
            return
        self._outcomes.append(self._evaluation.measure(step))

    # The end.

    def finish(self, actor: WorkerGroup) -> dict[str, Any]:
        """Writes the model and every result, shows the tables, and returns the summary."""
        with replacing(self.folder.model) as folder:
            actor.save(folder.absolute())
        self._progress.close()
        self._write_trace()
        draw_curves(self._metrics.history, self.folder.curves)
        summary = self._summary()
        write_json(self.folder.summary, summary)
        self._show()
        return summary

    def _write_trace(self) -> None:
        self.cluster.settle()
        events = self.cluster.calls.events
        write_json(self.folder.trace, chrome_trace(events), indent=None)
        # A whole run would be stripes; the last steps show what overlaps.
        window_s = sum(line.get("seconds", 0.0) for line in self._metrics.history[-_DRAWN_STEPS:])
        draw_timeline([e for e in events if e.method not in _STARTING], self.folder.timeline, window_s=window_s)

    def _summary(self) -> dict[str, Any]:
        events = self.cluster.calls.events
        loop = [event for event in events if event.method not in _STARTING]
        start_ns = min((event.started_ns for event in loop), default=0)
        end_ns = max((event.ended_ns for event in loop), default=0)
        outcomes = self._outcomes
        return {
            "steps": int(self._metrics.history[-1]["step"]) if self._metrics.history else 0,
            "seconds": time.monotonic() - self.started_s,
            "accuracy_before": outcomes[0].accuracy if outcomes else None,
            "accuracy_after": outcomes[-1].accuracy if outcomes else None,
            "evaluation_rows": outcomes[-1].num_rows if outcomes else 0,
            "peak_memory_mb": max(self._peak_mb, resident_mb()),
            "busy_fraction": busy_fractions(loop, start_ns, end_ns),
        }

    def _show(self) -> None:
        console = self._progress.console
        if self._outcomes:
            first, last = self._outcomes[0], self._outcomes[-1]
            rows = [
                ("held-out accuracy", first.accuracy, last.accuracy),
                ("response length (tokens)", first.response_length, last.response_length),
            ]
            console.print(before_after_table(rows))
            console.print(completions_table(last.samples))
        console.print(f"results: {self.folder.path}", markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()
        self._metrics.close()
        self.cluster.close()
        if error is not None and not self._metrics.history:
            # It failed before it had a result: the next try may use the same folder.
            shutil.rmtree(self.folder.path)
