"""What a run leaves at its end: curves, timeline, trace, summary, and what a person is shown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from flowrl.checkpoints.run_folder import RunFolder, write_json
from flowrl.data.events import CallEvent
from flowrl.report.chrome_trace import Trace, chrome_trace
from flowrl.report.evaluation_result import EvaluationResult
from flowrl.report.progress import outcome_tables
from flowrl.report.trace import busy_fractions, loop_events

DRAWN_STEPS = 4
"""Steps that `timeline.png` shows, of the last process; `trace.json` has all."""


def write_trace(folder: RunFolder, trace: Trace) -> None:
    """Writes `trace.json`."""
    write_json(folder.trace, chrome_trace(trace.events, trace.resumes, trace.counts), indent=None)


def draw_plots(
    folder: RunFolder,
    history: Sequence[Mapping[str, float]],
    events: Sequence[CallEvent],
    until_ns: int | None = None,
) -> None:
    """Draws `curves.png` and the last steps of `timeline.png`.

    Args:
        history: the metrics of every step.
        events: the calls of this process.
        until_ns: end of the timeline; None is the end of the last call.
    """
    from flowrl.report.curves import draw_curves  # noqa: PLC0415 (matplotlib only if the run draws plots)
    from flowrl.report.timeline import draw_timeline  # noqa: PLC0415 (as above)

    draw_curves(history, folder.curves)
    # Calls of a whole run would be thinner than a pixel; a few steps show what overlaps.
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
