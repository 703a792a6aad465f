"""Results at the end of a run: trace, plots, summary and the tables in the terminal."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from flowrl.checkpoints.run_folder import RunFolder, replacing, write_json
from flowrl.config import RolloutRunConfig, RunConfig
from flowrl.controller.cluster import Cluster
from flowrl.controller.errors import FlowError
from flowrl.controller.group import WorkerGroup
from flowrl.data.events import CallEvent, Counted
from flowrl.data.template import ConversationTemplate
from flowrl.report.chrome_trace import Trace, chrome_trace
from flowrl.report.progress import completions_table, result_table
from flowrl.report.recorded_calls import MAX_CALLS
from flowrl.report.rollout_log import RolloutLogError, evenly_spaced, read_rows, saved_steps
from flowrl.report.trace import loop_events
from flowrl.run.datasets.templates import save_template

DRAWN_STEPS = 4
"""Number of last steps in `timeline.png`."""

SAVE_TIMEOUT_S = 60.0
"""Seconds to wait for the calls in flight of a failed run, and for the files of its policy."""

NUM_RESPONSES = 8
"""Number of responses in the final table."""


def write_trace(
    folder: RunFolder,
    events: Sequence[CallEvent],
    dropped_until_ns: int,
    earlier: tuple[Trace, int] | None,
    counted: Iterable[Counted],
) -> None:
    """Writes the calls of a run to `trace.json`.

    Args:
        folder: the output folder.
        events: calls of this process.
        dropped_until_ns: time until which calls of this process were dropped; 0 without dropped calls.
        earlier: trace of the run before a resume, and the step from which it resumed.
        counted: time series of the rollout source.
    """
    trace = Trace(events, dropped_until_ns=dropped_until_ns)
    if earlier is not None and not dropped_until_ns:
        trace = earlier[0].followed_by(events, earlier[1])
    trace = trace.counted(counted).last_calls(max(MAX_CALLS, len(events)))
    value = chrome_trace(trace.events, trace.resumes, trace.counts, trace.dropped_until_ns)
    write_json(folder.trace, value, indent=None)


def draw_plots(
    folder: RunFolder,
    history: Sequence[Mapping[str, float]],
    events: Sequence[CallEvent],
    until_ns: int | None = None,
) -> None:
    """Draws `curves.png`, and the last steps of `timeline.png`. `until_ns` is the end of the timeline."""
    from flowrl.report.plots import draw_curves, draw_timeline  # noqa: PLC0415 (matplotlib only if the run draws plots)

    draw_curves(history, folder.curves)
    # Calls of a full run would be thinner than a pixel. A few steps show which calls overlap.
    window_s = sum(line.get("seconds", 0.0) for line in history[-DRAWN_STEPS:])
    draw_timeline(loop_events(events), folder.timeline, window_s=window_s or None, until_ns=until_ns)


def save_last_weights(
    policy: WorkerGroup | None,
    cluster: Cluster,
    folder: RunFolder,
    template: ConversationTemplate | None,
    history: Sequence[Mapping[str, float]],
) -> None:
    """Saves the policy of a run without checkpoints, after invalid input in a later step, such as a reward.

    Does nothing if `history`, the log records so far, has no training step.
    """
    if policy is None or not any(record["step"] for record in history):
        return
    try:
        cluster.calls.abandon_all(SAVE_TIMEOUT_S, keeps_events=True)
        with replacing(folder.model) as model:
            policy.save.submit(model.absolute()).get(SAVE_TIMEOUT_S)
            save_template(template, model)
    except (FlowError, OSError, TimeoutError) as error:
        cluster.notify(f"the weights could not be saved: {error}")
    else:
        cluster.notify(
            f"saved the weights after the last valid update to {folder.model}; to resume runs with their optimizer "
            "state, set checkpoint.every"
        )


def metric_titles(config: RunConfig) -> dict[str, str]:
    """Returns the titles of metrics that depend on the config: scores of a reward model are not an accuracy."""
    reward = config.reward_settings if isinstance(config, RolloutRunConfig) else None
    has_model_scores = reward is not None and reward.has_models and reward.evaluation is None
    return {"accuracy": "held-out reward"} if has_model_scores else {}


def show(
    console: Console,
    results: Sequence[tuple[int, Mapping[str, float]]],
    folder: RunFolder,
    titles: Mapping[str, str] | None = None,
) -> None:
    """Prints the evaluations before and after training, a few saved responses, and the folder of the results.

    `results` has the step and the metrics of the first and the last evaluation.
    `titles` replace the default titles of metrics.
    """
    if results:
        (first_step, first), (last_step, last) = results[0], results[-1]
        console.print(result_table(first, last, titles))
        _print_responses(console, folder, first_step, last_step)
    console.print(f"results: {folder.path}", markup=False)


def _print_responses(console: Console, folder: RunFolder, first_step: int, last_step: int) -> None:
    """Prints a few responses of the last evaluation, next to those of the first evaluation, if they are saved."""
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
