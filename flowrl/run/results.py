"""What a run leaves at its end: curves, timeline, trace, summary, and what a person is shown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from flowrl.checkpoints.run_folder import RunFolder, write_json
from flowrl.data.events import CallEvent
from flowrl.report.chrome_trace import Trace, chrome_trace
from flowrl.report.curves import draw_curves
from flowrl.report.evaluation_result import EvaluationResult
from flowrl.report.progress import outcome_tables
from flowrl.report.timeline import draw_timeline
from flowrl.report.trace import busy_fractions, loop_events

DRAWN_STEPS = 4
"""Steps that `timeline.png` shows, of the last process; `trace.json` has all."""


def draw(
    folder: RunFolder,
    history: Sequence[Mapping[str, float]],
    trace: Trace,
    events: Sequence[CallEvent],
    until_ns: int | None = None,
) -> None:
    """Writes the pictures and the trace.

    Args:
        history: the metrics of every step.
        trace: of the whole run.
        events: of this process, which the timeline shows the end of.
        until_ns: where that ends; None is the last call.
    """
    draw_curves(history, folder.curves)
    write_json(folder.trace, chrome_trace(trace.events, trace.resumes, trace.counts), indent=None)
    # A whole run would be stripes; the last steps show what overlaps.
    window_s = sum(line.get("seconds", 0.0) for line in history[-DRAWN_STEPS:])
    draw_timeline(loop_events(events), folder.timeline, window_s=window_s, until_ns=until_ns)


def summary_of(history: Sequence[Mapping[str, float]], events: Iterable[CallEvent]) -> dict[str, Any]:
    """What the summary says of steps and devices: steps done, and how long each device was busy in the loop."""
    loop = loop_events(events)
    start_ns = min((event.started_ns for event in loop), default=0)
    end_ns = max((event.ended_ns for event in loop), default=0)
    return {
        "steps": int(history[-1]["step"]) if history else 0,
        "busy_fraction": busy_fractions(loop, start_ns, end_ns),
    }


def show(console: Console, outcomes: Sequence[EvaluationResult], folder: RunFolder) -> None:
    """Prints what training changed, and where the results are."""
    if outcomes:
        for table in outcome_tables(outcomes[0], outcomes[-1]):
            console.print(table)
    console.print(f"results: {folder.path}", markup=False)
