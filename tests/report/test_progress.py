"""Metrics file, TensorBoard events, progress line and result tables. The format of the line is the feature."""

import io
import itertools
import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowrl.report.progress import (
    History,
    LiveProgress,
    MetricsLog,
    before_after_table,
    completions_table,
    format_clock,
    result_table,
)
from flowrl.report.trackers.open_trackers import Trackers
from flowrl.report.trackers.tensorboard_tracker import TensorBoardTracker
from flowrl.report.trackers.tracker import TrackedRun
from tests.errors import missing_facts
from tests.full_disk import file_size_limit


def open_tensorboard(folder: Path, last_step: int = -1) -> Trackers:
    return Trackers([TensorBoardTracker(TrackedRun(folder, {}, last_step))])


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue] (a StringIO, above)


def progress_output(num_steps: int, *, terminal: bool, **values: float) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with LiveProgress(num_steps, console=console) as progress:
        for step in range(1, num_steps + 1):
            progress.calls_done(step, values)
    return out.getvalue()


def lines_of(num_steps: int, step_s: float, *, last_step: int | None = None) -> list[str]:
    """Returns the steps that have a line in a plain output, if each step takes `step_s` seconds."""
    out, now_s = io.StringIO(), 0.0
    with LiveProgress(num_steps, console=Console(file=out, width=200), clock=lambda: now_s) as progress:
        for step in range(1, (last_step or num_steps) + 1):
            now_s += step_s
            progress.calls_done(step, {"reward": 0.5})
    progress.close()
    return [line.split()[1] for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("step_s", [10.0, 300.0])
def test_a_plain_output_has_a_line_per_slow_step(step_s: float) -> None:
    assert lines_of(4, step_s) == ["1/4", "2/4", "3/4", "4/4"]


def test_a_plain_output_has_a_line_every_ten_seconds_of_fast_steps() -> None:
    assert lines_of(23, 2.0) == ["1/23", "6/23", "11/23", "16/23", "21/23", "23/23"]


def test_a_plain_output_has_the_first_and_the_last_step_of_a_short_run() -> None:
    assert lines_of(25, 0.1) == ["1/25", "25/25"]


def test_a_run_that_ends_early_shows_its_last_step_once() -> None:
    assert lines_of(40, 0.1, last_step=12) == ["1/40", "12/40"]


def test_a_line_shows_metrics_and_eta() -> None:
    line = progress_output(1, terminal=False, reward=0.5, kl=0.01, response_length=3.2, tokens_per_s=12345.0)
    assert line == "training 1/1  reward 0.500  KL 0.0100  response length 3.2  12,345 tokens/s  ETA 0:00\n"


def test_an_old_value_is_shown_with_its_step_and_nan_is_not_shown() -> None:
    out = io.StringIO()
    with LiveProgress(2, console=Console(file=out, width=200)) as progress:
        progress.calls_done(1, {"accuracy": 0.25})
        progress.calls_done(2, {"accuracy": float("nan"), "grad_norm": 1.0})
    assert out.getvalue().splitlines() == [
        "training 1/2  accuracy 0.250  ETA 0:00",
        "training 2/2  accuracy 0.250 (step 1)  ETA 0:00",
    ]


def test_the_share_of_failed_rewards_is_shown_until_an_evaluation_without_failures() -> None:
    out = io.StringIO()
    with LiveProgress(3, console=Console(file=out, width=200), clock=itertools.count(step=10.0).__next__) as progress:
        for step, failed in enumerate(({}, {"evaluation/failed_fraction": 0.25}, {}), start=1):
            progress.evaluated(step, {"accuracy": 0.5, **failed})
            progress.calls_done(step, {"seconds": 10.0})
    assert ["25%" in line for line in out.getvalue().splitlines()] == [False, True, False]


def test_failed_rewards_of_one_of_two_evaluations_are_in_the_table() -> None:
    output = printed(result_table({"accuracy": 0.5}, {"accuracy": 1.0, "evaluation/failed": 3.0}))
    assert "+0.500" in output and "3.000" in output


def test_a_terminal_shows_a_bar() -> None:
    output = progress_output(3, terminal=True, reward=0.5)
    assert "3/3" in output
    assert "reward 0.500" in output


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3_725, "1:02:05")])
def test_clock_format(seconds: float, shown: str) -> None:
    assert format_clock(seconds) == shown


def test_before_after_table_shows_the_change() -> None:
    output = printed(before_after_table([("greedy accuracy", 0.25, 0.5)]))
    assert [c.strip() for c in output.splitlines()[4].strip("│").split("│")] == [
        "greedy accuracy",
        "0.250",
        "0.500",
        "+0.250",
    ]


def test_markup_in_completions_is_not_interpreted() -> None:
    samples: list[dict[str, Any]] = [{"prompt": "1+1", "response": "[bold]2[/]", "answer": "2", "score": 0.5}]
    output = printed(completions_table(samples))
    assert "[bold]2[/]" in output
    assert "0.50" in output


def test_terminal_codes_in_completions_are_escaped() -> None:
    names = ("prompt", "before", "response", "answer")
    output = printed(completions_table([dict.fromkeys(names, "a\x1b[2J\x9b31m")]))
    assert not {"\x1b", "\x9b"} & set(output) and output.count("\\x1b[2J") == len(names)


def test_columns_without_values_are_omitted() -> None:
    output = printed(completions_table([{"prompt": "hello", "response": "hi"}]))
    assert "hello" in output
    assert "score" not in output


def test_every_step_is_one_line_with_null_for_nan(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.step_done(0, {"accuracy": 0.25})
        log.step_done(1, {"reward": 0.5, "kl": float("nan")})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "accuracy": 0.25},
        {"step": 1, "reward": 0.5, "kl": None},
    ]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.step_done(1, {"reward": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.5}\n'
    log.close()
    log.close()


def test_a_folder_that_disappears_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with MetricsLog(tmp_path / "run") as log:
        log.step_done(1, {"reward": 0.5})
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(FileNotFoundError):
            log.step_done(2, {"reward": 0.5})


@pytest.mark.parametrize("has_tensorboard", [False, True])
def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path, has_tensorboard: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        pytest.raises(OSError) as caught,
        file_size_limit(100_000),
        open_tensorboard(folder) if has_tensorboard else MetricsLog(folder) as log,
    ):
        for step in range(1, 100):
            log.step_done(step, {f"metric_{i}": 0.5 for i in range(100)})
    assert Path(caught.value.filename).is_relative_to(folder)


def test_tensorboard_has_every_value_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with open_tensorboard(tmp_path) as log:
        log.step_done(1, {"actor/loss": 0.5})
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("actor/loss")
        assert [(event.step, event.value) for event in events] == [(1, 0.5)]


def test_tensorboard_reads_the_same_values(tmp_path: Path) -> None:
    with open_tensorboard(tmp_path) as log:
        log.step_done(1, {"actor/loss": 0.5})
        log.step_done(2, {"actor/loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("actor/loss")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 0.25)]


def test_the_history_has_every_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.step_done(1, {"reward": 0.5})
        log.step_done(2, {"reward": 0.75})
    records = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75}]
    assert list(log.history) == log.history[-5:] == records and log.history[-1] == records[1]
    assert list(reversed(log.history)) == records[::-1] and isinstance(log.history[0]["step"], int)


def test_a_record_of_the_history_takes_little_memory() -> None:
    """The names repeat in each record, so they are stored once."""
    history = History()
    tracemalloc.start()
    for step in range(1_000):
        history.append({"step": step} | {f"metric_{i}": step / 3 for i in range(40)})
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes / 1_000 < 600


def test_a_step_is_written_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.step_done(1, {"reward": 0.5})
        with pytest.raises(AssertionError):
            log.step_done(1, {"reward": 0.5})


def test_a_resumed_log_keeps_the_lines_up_to_its_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in (0, 1, 2, 3):
            log.step_done(step, {"reward": step / 4, "kl": float("nan")})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    with MetricsLog(tmp_path, last_step=2) as log:
        assert [row["step"] for row in log.history] == [0, 1, 2]
        log.step_done(3, {"reward": 9.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 9.0)]
    assert lines[1]["kl"] is None


def write_records(folder: Path, steps: range) -> list[str]:
    """Writes records of steps to `metrics.jsonl`, and returns its lines."""
    with MetricsLog(folder) as log:
        for step in steps:
            log.step_done(step, {"reward": step / 4})
    return (folder / "metrics.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        '{"step": 3, "rew\n',
        "\x00\xff\n",
        "[]\n",
        '{"step": 3, "reward": "a"}\n',
        '{"step": 1}\n',
        "[" * 9999 + "\n",
    ],
)
def test_lost_lines_are_reported_and_later_lines_are_kept(damaged: str, tmp_path: Path) -> None:
    lines = write_records(tmp_path, range(7))
    del lines[6], lines[1]
    lines[2] = damaged
    (tmp_path / "metrics.jsonl").write_bytes("".join(lines).encode("latin-1"))
    messages: list[str] = []
    with MetricsLog(tmp_path, last_step=6, notify=messages.append) as log:
        assert [row["step"] for row in log.history] == [0, 2, 4, 5]
    (message,) = messages
    assert not missing_facts(message.replace(",", " "), tmp_path / "metrics.jsonl", 3, 6) and "1, 3, 6" in message


def test_consecutive_lost_steps_are_reported_as_a_range(tmp_path: Path) -> None:
    lines = write_records(tmp_path, range(1, 10))
    (tmp_path / "metrics.jsonl").write_text("".join([*lines[:1], *lines[5:6]]))
    messages: list[str] = []
    MetricsLog(tmp_path, last_step=8, notify=messages.append).close()
    assert "2 to 5, 7, 8" in messages[0]
    (tmp_path / "metrics.jsonl").unlink()
    MetricsLog(tmp_path, last_step=8, notify=messages.append).close()
    assert "1 to 8" in messages[1]


def test_a_complete_log_reports_no_lost_lines(tmp_path: Path) -> None:
    write_records(tmp_path, range(1, 4))
    messages: list[str] = []
    for last_step in (2, 0, -1):
        MetricsLog(tmp_path, last_step, notify=messages.append).close()
    assert not messages


def test_tensorboard_shows_a_repeated_step_once(tmp_path: Path) -> None:
    with open_tensorboard(tmp_path) as log:
        for step in (1, 2, 3):
            log.step_done(step, {"reward": 0.5})
    with open_tensorboard(tmp_path, last_step=1) as log:
        log.step_done(2, {"reward": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 0.75)]


def test_tensorboard_is_optional(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.step_done(1, {"reward": 0.5})
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.slow
def test_matplotlib_tensorboard_and_tenacity_are_loaded_only_when_used() -> None:
    """tests/test_architecture.py checks the imports of flowrl. This test includes those of its libraries."""
    libraries = {"matplotlib", "tensorboard", "tenacity"}
    code = f"import sys, flowrl.run.loop, flowrl.workers; print({libraries} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
