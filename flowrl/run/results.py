"""Results at the end of a run: trace, summary and the tables in the terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console

from flowrl.checkpoints.run_folder import RunFolder, replacing, write_json
from flowrl.config import RolloutRunConfig, RunConfig
from flowrl.controller.errors import FlowError
from flowrl.controller.group import WorkerGroup
from flowrl.data.events import Counted
from flowrl.report.chrome_trace import Trace, TraceError, chrome_trace, read_trace
from flowrl.report.progress import completions_table, result_table
from flowrl.report.rollout_log import RolloutLogError, evenly_spaced, read_rows, saved_steps
from flowrl.report.run_observer import RunObserver
from flowrl.report.trace import MAX_CALLS
from flowrl.run.datasets.templates import save_template
from flowrl.run.monitoring.step_log import StepLog
from flowrl.run.start import StartedRun

SAVE_TIMEOUT_S = 60.0
"""Seconds to wait for the calls in flight of a failed run, and for the files of its policy."""

NUM_RESPONSES = 8
"""Number of responses in the final table."""


class ResultFiles(RunObserver):
    """Writes the trace and the summary of a run."""

    def __init__(self, started: StartedRun, log: StepLog) -> None:
        self._folder, self._cluster, self._log = started.folder, started.cluster, log
        self._resumed, self._earlier = started.resumed, Trace()
        if started.resumed is not None:
            with suppress(TraceError):  # a killed process has not written a trace
                self._earlier = read_trace(started.folder.trace).up_to_save(started.resumed.manifest.saved_at_s)
        self.counted: Callable[[], Iterable[Counted]] = tuple
        """Returns the values of the rollout source's counters over time, for the trace. Initially: none."""

    def ended(self, summary: Mapping[str, Any]) -> None:
        self.write_trace()
        # The summary is written last, because it marks the run as complete.
        write_json(self._folder.summary, summary)

    def write_trace(self) -> None:
        """Writes `trace.json`."""
        events, dropped_until_ns = list(self._cluster.calls.events), self._log.recorded.dropped_until_ns
        trace = Trace(events, dropped_until_ns=dropped_until_ns)
        if self._resumed is not None and not dropped_until_ns:
            trace = self._earlier.followed_by(events, self._resumed.manifest.step)
        trace = trace.counted(self.counted()).last_calls(max(MAX_CALLS, len(events)))
        value = chrome_trace(trace.events, trace.resumes, trace.counts, trace.dropped_until_ns)
        write_json(self._folder.trace, value, indent=None)


def save_weights(group: WorkerGroup, started: StartedRun, timeout_s: float | None = None) -> None:
    """Saves a group's model in the run folder like `save_pretrained`. Blocks, for at most `timeout_s` if it is set."""
    with replacing(started.folder.model) as folder:
        group.save.submit(folder.absolute(), started.config.export).get(timeout_s)
        save_template(started.template, folder)


def save_last_weights(policy: WorkerGroup | None, started: StartedRun, history: Sequence[Mapping[str, float]]) -> None:
    """Saves the policy if invalid input, such as a failed reward, has ended a run without checkpoints.

    Does nothing without a policy, or if `history` (log records) has no training step. Reports errors to the user.
    """
    if policy is None or not any(record["step"] for record in history):
        return
    try:
        started.cluster.calls.abandon_all(SAVE_TIMEOUT_S, keeps_events=True)
        save_weights(policy, started, SAVE_TIMEOUT_S)
    except (FlowError, OSError, TimeoutError) as error:
        started.cluster.notify(f"the weights could not be saved: {error}")
    else:
        started.cluster.notify(
            f"saved the weights after the last valid update to {started.folder.model}; to resume runs with their "
            "optimizer state, set checkpoint.every"
        )


def metric_titles(config: RunConfig) -> dict[str, str]:
    """Returns metric -> title. With a reward model, `accuracy` is titled `held-out reward`. Has no other metrics."""
    reward = config.reward_settings if isinstance(config, RolloutRunConfig) else None
    has_model_scores = reward is not None and reward.has_models and reward.evaluation is None
    return {"accuracy": "held-out reward"} if has_model_scores else {}


def show(
    console: Console,
    results: Sequence[tuple[int, Mapping[str, float]]],
    folder: RunFolder,
    config: RunConfig,
) -> None:
    """Prints the evaluations before and after training, a few saved responses, and the folder of the results.

    `results` has (step, metrics) of the evaluations. If it is empty, only the folder is printed.
    """
    if results:
        (first_step, first), (last_step, last) = results[0], results[-1]
        console.print(result_table(first, last, metric_titles(config)))
        _print_responses(console, folder, first_step, last_step)
    console.print(f"results: {folder.path}", markup=False)


def _print_responses(console: Console, folder: RunFolder, first_step: int, last_step: int) -> None:
    """Prints a few saved responses of the last evaluation, next to those of the first evaluation (same prompts)."""
    saved = saved_steps(folder.rollouts, "evaluation")
    if last_step not in saved:
        return
    try:
        rows = read_rows(folder.rollouts, "evaluation", last_step)
        first_rows = read_rows(folder.rollouts, "evaluation", first_step) if first_step in saved else []
    except RolloutLogError as error:  # not raised, because all results are already written
        console.print(str(error), markup=False)
        return
    before = {row["row"]: {"before": row["response"]} for row in first_rows}
    shown = [rows[i] for i in evenly_spaced(NUM_RESPONSES, len(rows))]
    console.print(completions_table([row | before.get(row["row"], {}) for row in shown]))
