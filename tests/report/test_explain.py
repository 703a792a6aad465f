"""The output of `flowrl trace` for a step with known times. Its wording and format are the feature."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from flowrl.data.events import CallEvent
from flowrl.report.explain import describe_bottleneck, explain, format_duration
from flowrl.report.trace import busy_fractions, critical_path
from tests.report.call_events import STEP, timed


def printed(events: list[CallEvent], *, width: int = 100, window_s: float | None = None) -> str:
    console = Console(file=StringIO(), width=width)
    explain(events, console=console, window_s=window_s)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    """Returns the cells of all table rows."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]


def to_ms(events: list[CallEvent]) -> list[CallEvent]:
    """Returns the calls with nanoseconds turned into milliseconds."""
    names = ("submitted_ns", "arrived_ns", "started_ns", "ended_ns", "finished_ns")
    return [replace(event, **{name: getattr(event, name) * 10**6 for name in names}) for event in events]


def test_the_first_line_counts_calls_and_time() -> None:
    assert printed(to_ms(STEP)).startswith("5 calls in 180 ms\n")


def test_calls_are_listed_with_median_and_total() -> None:
    again = timed(6, "actor.update", "cpu:0", (182, 190, 190, 200, 200))
    lines = cells(printed(to_ms([*STEP, again])))
    assert ["actor.update", "median", "44.5 ms", "0.00 ms", "8.50 ms", "25.0 ms"] in lines
    assert ["2 calls", "total", "89.0 ms", "0.00 ms", "17.0 ms", "50.0 ms"] in lines


def test_the_critical_path_is_listed_with_its_shares() -> None:
    lines = cells(printed(to_ms(STEP)))
    assert ["actor.update", "compute", "40.0 ms", "22.2%"] in lines
    assert ["actor.save", "driver, before the call", "20.0 ms", "11.1%"] in lines


def test_roles_and_devices_are_listed_as_busy_and_idle() -> None:
    lines = cells(printed(to_ms(STEP)))
    assert ["actor", "1 rank", "27.8%", "72.2%"] in lines
    assert ["node0/cpu:1", "main pool", "16.7%", "83.3%"] in lines


def test_small_entries_of_the_path_are_merged() -> None:
    events = [
        timed(1, "a.m", "cpu:0", (0, 3, 3, 997, 998)),
        timed(2, "b.m", "cpu:0", (0, 998, 998, 1000, 1000)),
    ]
    assert ["other", "", "6.00 ms", "0.6%"] in cells(printed(to_ms(events)))


def test_a_window_contains_the_calls_that_finished_in_it() -> None:
    text = printed(to_ms(STEP), window_s=0.05)
    assert text.startswith("2 calls in 50.0 ms\n")
    assert ["actor.save", "driver, before the call", "20.0 ms", "40.0%"] in cells(text)


@pytest.mark.parametrize("width", [1, 20, 63, 64, 80])
def test_no_number_is_truncated_on_a_narrow_terminal(width: int) -> None:
    text = printed(to_ms(STEP), width=width)
    assert "…" not in text and "40.0 ms" in text and "22.2%" in text and "83.3%" in text


def bottleneck(events: list[CallEvent]) -> str:
    return describe_bottleneck(critical_path(events), busy_fractions(events, 0, 200))


def test_compute_bottleneck() -> None:
    text = bottleneck(STEP)
    assert (
        text.startswith("bottleneck: compute (66%), mostly actor.update (22%)") and "node0/cpu:0 was busy 44%" in text
    )


def test_driver_bottleneck() -> None:
    events = [timed(1, "a.m", "cpu:0", (0, 0, 0, 20, 20)), timed(2, "b.m", "cpu:0", (80, 80, 80, 100, 100))]
    assert bottleneck(events) == "bottleneck: driver (60%), mostly before b.m (60%)"


def test_transfer_bottleneck() -> None:
    events = [timed(1, "a.m", "cpu:0", (0, 10, 10, 20, 20)), timed(2, "b.m", "cpu:1", (0, 75, 90, 95, 100), 1)]
    assert bottleneck(events) == "bottleneck: data transfer (85%), mostly b.m (75%)"


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0.00 ms"),
        (9_994_000, "9.99 ms"),
        (9_996_000, "10.0 ms"),
        (99_960_000, "100 ms"),
        (999_400_000, "999 ms"),
        (999_600_000, "1.00 s"),
        (12_340_000_000, "12.3 s"),
        (4_567_800_000_000, "4,568 s"),
    ],
)
def test_durations_have_three_digits(ns: int, text: str) -> None:
    assert format_duration(ns) == text
