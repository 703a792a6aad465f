"""The viewer, driven by key presses, on the folder of a real run."""

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.style import Style
from textual.pilot import Pilot
from textual.widgets import Input, Static

from flowrl.config import RolloutLogConfig
from flowrl.report.rollout_log import RolloutLog, Row, read_rows
from flowrl.report.viewer.row_screens import CompareScreen, DetailScreen, HelpScreen
from flowrl.report.viewer.row_table import RowTable
from flowrl.report.viewer.text_view import TextView
from flowrl.report.viewer.viewer_app import ViewerApp
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.configs import quickstart_settings
from tests.errors import rejects
from tests.report.viewer.saved_rows import TOKENS, make_row
from tests.slow_cases import one_of
from tests.small_task import prepare_small

SMALL, LARGE = (80, 24), (160, 50)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps with an evaluation before and after them."""
    folder = tmp_path_factory.mktemp("run")
    prepare_small(folder / "data")
    settings = quickstart_settings(folder / "data", folder / "run", steps=2, batch_size=16, minibatch_size=16)
    settings["data"] |= {"evaluation_rows": 6}
    settings["actor"] |= {"old_logprobs": "recompute"}  # otherwise, there are no ratios
    settings |= {
        "samples_per_prompt": 4,
        "algorithm": {"estimator": "grpo"},
        "reward": [
            {"name": "task", "function": "recipes.quickstart.task:score"},
            {"name": "size", "weight": 0.5, "function": "tests.report.viewer.saved_rows:count_characters"},
        ],
        "rollout": {"max_response_tokens": 6},
        "report": {"rollouts": {"every": 1, "rows": "all", "token_rows": 3}},
    }
    train(GRPOConfig.model_validate(settings))
    return folder / "run"


def drive(
    folder: Path, script: Callable[[Pilot[None]], Awaitable[None]], size: tuple[int, int] = SMALL, **options: Any
) -> None:
    """Opens the viewer in a terminal of a size, and runs a script of key presses."""

    async def run() -> None:
        async with ViewerApp(folder, **options).run_test(size=size) as pilot:
            await wait_until_idle(pilot)
            await script(pilot)

    asyncio.run(run())


async def wait_until_idle(pilot: Pilot[None]) -> None:
    """Waits until files are read and the screen shows them."""
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await wait_until_idle(pilot)


async def ask(pilot: Pilot[None], key: str, text: str) -> None:
    """Opens the input line, replaces its text and submits it."""
    await press(pilot, key)
    box = pilot.app.focused
    assert isinstance(box, Input)
    box.value = text
    await press(pilot, "enter")


def table(pilot: Pilot[None], name: str = "rows") -> RowTable:
    return pilot.app.screen.query_one(f"#{name}", RowTable)


def shown(pilot: Pilot[None], name: str) -> str:
    return str(pilot.app.screen.query_one(f"#{name}", Static).content)


def indices(rows: Any) -> list[int]:
    return [row["row"] for row in rows]


def test_the_latest_training_rows_are_shown_first(run_folder: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        assert [(row["step"], row["kind"]) for row in table(pilot, "steps").rows] == [
            (0, "evaluation"),
            *((1, "training"), (2, "training"), (2, "evaluation")),
        ]
        assert table(pilot).rows == read_rows(run_folder / "rollouts", "training", 2)
        assert "step 2 training" in shown(pilot, "heading") and "16 rows" in shown(pilot, "heading")
        await press(pilot, "left", "up")
        assert table(pilot).rows == read_rows(run_folder / "rollouts", "training", 1)
        await press(pilot, "home", "enter")
        assert table(pilot).rows == read_rows(run_folder / "rollouts", "evaluation", 0)
        assert table(pilot).has_focus

    drive(run_folder, script)


def test_the_step_of_the_command_is_shown_first(run_folder: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        assert table(pilot).rows == read_rows(run_folder / "rollouts", "evaluation", 2)

    drive(run_folder, script, step=2, kind="evaluation")
    with rejects(9):
        ViewerApp(run_folder, step=9)
    with rejects(run_folder / "missing"):
        ViewerApp(run_folder / "missing")


def test_rows_are_filtered_and_sorted(run_folder: Path) -> None:
    rows = read_rows(run_folder / "rollouts", "training", 2)
    limit = sorted(row["score"] for row in rows)[8]

    async def script(pilot: Pilot[None]) -> None:
        await ask(pilot, "f", f"score<{limit}")
        selected = [row for row in rows if row["score"] < limit]
        assert 0 < len(selected) < 16 and table(pilot).rows == selected
        assert f"{len(selected)} of 16 rows" in shown(pilot, "heading")
        await press(pilot, "s")
        assert table(pilot).rows == sorted(selected, key=lambda row: row["score"])
        await press(pilot, "S")
        assert table(pilot).rows == sorted(selected, key=lambda row: row["score"], reverse=True)
        await ask(pilot, "f", "")
        assert len(table(pilot).rows) == 16

    drive(run_folder, script)


def test_an_invalid_filter_is_explained_and_changes_nothing(run_folder: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await ask(pilot, "f", "scor<1")
        assert "scor" in shown(pilot, "problem")
        assert pilot.app.screen.query_one("#problem").display and isinstance(pilot.app.focused, Input)
        await press(pilot, "escape")
        assert table(pilot).has_focus and len(table(pilot).rows) == 16

    drive(run_folder, script)


@pytest.mark.slow
def test_a_filter_may_contain_the_keys_of_commands(run_folder: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "f", *"qsc", "slash", "question_mark", *"nf")
        box = pilot.app.focused
        assert isinstance(box, Input) and box.value == "qsc/?nf"

    drive(run_folder, script)


@pytest.mark.slow
def test_a_search_moves_the_cursor_to_the_next_row(run_folder: Path) -> None:
    rows = read_rows(run_folder / "rollouts", "training", 2)
    text = rows[9]["prompt"]
    matches = [i for i, row in enumerate(rows) if text in row["prompt"]]

    async def script(pilot: Pilot[None]) -> None:
        await ask(pilot, "slash", text)
        assert table(pilot).cursor == matches[0]
        await press(pilot, "n")
        assert table(pilot).cursor == matches[1]
        await press(pilot, "N", "N")
        assert table(pilot).cursor == matches[-1]

    drive(run_folder, script)


def test_a_row_shows_its_tokens(run_folder: Path) -> None:
    row = read_rows(run_folder / "rollouts", "training", 2)[0]

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, DetailScreen)
        view = pilot.app.screen.query_one(TextView)
        assert (view.row, view.token, view.metric) == (row, 0, "advantage")
        assert f"1/{len(row['tokens']['ids'])}" in shown(pilot, "value")
        for metric in ("ratio", "gap", "mask", "version", "advantage"):
            await press(pilot, "m")
            assert view.metric == metric and f"color: {metric}" in shown(pilot, "legend")
        await press(pilot, "right")
        assert view.token == 1 and f"2/{len(row['tokens']['ids'])}" in shown(pilot, "value")
        await press(pilot, "right_square_bracket")
        assert view.row is not None and view.row["row"] == 1 and "no values per token" in shown(pilot, "legend")
        await press(pilot, "escape")
        assert table(pilot).cursor == 1

    drive(run_folder, script)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_preview_needs_a_high_terminal(run_folder: Path, size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None]) -> None:
        preview = pilot.app.screen.query_one("#preview", TextView)
        assert preview.display == (size == LARGE)
        await press(pilot, "down")
        assert preview.row == table(pilot).row

    drive(run_folder, script, size)


@pytest.mark.slow
def test_one_prompt_is_compared_across_steps(run_folder: Path) -> None:
    evaluations = [read_rows(run_folder / "rollouts", "evaluation", step)[3] for step in (0, 2)]

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "down", "down", "down", "c")
        assert isinstance(pilot.app.screen, CompareScreen)
        compared = table(pilot, "compared")
        assert (list(compared.rows), compared.cursor) == (evaluations, 1)
        await press(pilot, "up", "enter")
        assert pilot.app.screen.query_one(TextView).row == evaluations[0]
        await press(pilot, "escape", "escape")
        assert table(pilot).cursor == 3

    drive(run_folder, script, step=2, kind="evaluation")


@pytest.mark.slow
def test_the_help_is_shown_on_every_screen(run_folder: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        for keys in ((), ("enter",), ("escape", "c")):
            await press(pilot, *keys, "question_mark")
            assert isinstance(pilot.app.screen, HelpScreen)
            await press(pilot, "escape")
            assert not isinstance(pilot.app.screen, HelpScreen)

    drive(run_folder, script)


@pytest.mark.slow
def test_rows_of_an_active_run_appear(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts", RolloutLogConfig(every=1))
    log.write("training", 1, [make_row()])

    async def script(pilot: Pilot[None]) -> None:
        log.write("training", 2, [make_row(step=2), make_row(1)])
        await press(pilot, "r")
        assert [row["step"] for row in table(pilot, "steps").rows] == [1, 2]
        assert len(table(pilot).rows) == 1  # the selected step stays
        await press(pilot, "left", "down")
        assert len(table(pilot).rows) == 2

    drive(tmp_path, script)


@pytest.mark.slow
def test_a_removed_step_is_reported(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts", RolloutLogConfig(every=1))
    for step in (1, 2):
        log.write("training", step, [make_row()])

    async def script(pilot: Pilot[None]) -> None:
        (tmp_path / "rollouts" / "training-000001.jsonl").unlink()
        await press(pilot, "left", "up")
        assert table(pilot).rows == read_rows(tmp_path / "rollouts", "training", 2)

    drive(tmp_path, script)


def lines(view: Any) -> list[str]:
    return ["".join(segment.text for segment in view.render_line(y)) for y in range(view.size.height)]


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    tokens = TOKENS | {"text": ["\x1b[31m", "", "\x07", "\u202e"]}
    row = make_row(prompt="\x1b]0;title\x07", response="\x1b[2J", tokens=tokens)
    RolloutLog(tmp_path / "rollouts", RolloutLogConfig()).write("training", 1, [row])

    async def script(pilot: Pilot[None]) -> None:
        texts = [*lines(table(pilot)), shown(pilot, "heading")]
        await press(pilot, "enter")
        texts += [*lines(pilot.app.screen.query_one(TextView)), shown(pilot, "value")]
        await press(pilot, "c")
        texts += lines(table(pilot, "compared"))
        text = "\n".join(texts)
        assert not set(text) & set("\x1b\x07\u202e") and "\\x1b[31m" in text and "\\x1b[2J" in text

    drive(tmp_path, script)


@pytest.mark.slow
def test_without_colors_tokens_are_underlined_and_reversed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    row = make_row(tokens=TOKENS | {"text": ["aa", "bb", "cc", "dd"], "advantages": [0.1, 1.0, None, -1.0]})
    RolloutLog(tmp_path / "rollouts", RolloutLogConfig()).write("training", 1, [row])

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        view = pilot.app.screen.query_one(TextView)
        segments = [segment for y in range(view.size.height) for segment in view.render_line(y)]
        styles = {segment.text: segment.style or Style() for segment in segments}
        assert styles["bb"].reverse and not styles["bb"].underline
        assert styles["dd"].underline and not styles["dd"].reverse
        assert not styles["cc"].underline and not styles["cc"].reverse

    drive(tmp_path, script)


@pytest.mark.slow
def test_long_texts_are_wrapped_once(tmp_path: Path) -> None:
    count = 5_000
    tokens = {
        name: [values[0]] * count for name, values in TOKENS.items() if name not in ("text", "logprobs", "ratios")
    }
    tokens["text"] = [f" word{i}" for i in range(count)]
    row: Row = make_row(response="".join(tokens["text"]), response_length=count, tokens=tokens)
    RolloutLog(tmp_path / "rollouts", RolloutLogConfig()).write("training", 1, [row])

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        view = pilot.app.screen.query_one(TextView)
        await press(pilot, "end")
        assert f"word{count - 1}" in "".join(lines(view))
        await ask(pilot, "slash", "word777 ")
        assert "word777 " in lines(view)[0]

    drive(tmp_path, script)


@pytest.mark.parametrize("ending", one_of(None, signal.SIGTERM, signal.SIGHUP))
def test_the_command_opens_the_viewer_in_a_terminal(run_folder: Path, ending: signal.Signals | None) -> None:
    """The key q and signals close it, and the terminal has its previous contents again."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "flowrl.cli", "show", str(run_folder)]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    output = b""
    try:
        while b"mean score" not in output:
            assert select.select([controller], [], [], 60)[0], output
            output += os.read(controller, 65536)
        if ending is None:
            os.write(controller, b"q")
        else:
            process.send_signal(ending)
        with suppress(OSError):  # the terminal is closed when the program ends
            while select.select([controller], [], [], 60)[0]:
                output += os.read(controller, 65536)
        assert process.wait(60) == (0 if ending is None else -ending)
        assert b"\x1b[?1049l" in output  # leaves the alternate screen
    finally:
        process.kill()
        process.wait()
        os.close(controller)


CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of this session
os.execv(sys.executable, [sys.executable, "-m", "flowrl.cli", "show", sys.argv[1]])
"""


@pytest.mark.slow
def test_a_closed_terminal_ends_the_viewer(run_folder: Path) -> None:
    """Otherwise, a viewer without a terminal would use a core until someone ends it."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-c", CONTROLLED, str(run_folder)]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    )
    try:
        os.close(terminal)
        output = b""
        while b"mean score" not in output:
            assert select.select([controller], [], [], 60)[0], output
            output += os.read(controller, 65536)
        os.close(controller)
        assert process.wait(60) in (-signal.SIGHUP, 128 + signal.SIGHUP)
    finally:
        process.kill()
        process.wait()
