"""The command `flowrl replay`: its result, its errors, and the debugger."""

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from flowrl.cli import main
from flowrl.config import RunConfig
from flowrl.run.replay.recording import BATCH, recordings
from flowrl.run.replay.step_replay import RESULT
from tests.errors import missing_facts

Corruption = Callable[[Path], object]


def run_command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["replay", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_an_identical_step_ends_with_exit_code_0(recorded: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_command(capsys, recorded.output, "--step", 2)
    assert (code, err) == (0, "")
    assert "bitwise identical" in out and "reward" in out.partition("not replayed")[2]


def test_a_different_step_ends_with_exit_code_1(
    recorded: RunConfig, task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of the reference model have changed since the recording."""
    path = task / "model" / "model.safetensors"
    before = path.read_bytes()
    weights = load_file(path)
    save_file({name: 2 * weight for name, weight in weights.items()}, path, metadata={"format": "pt"})
    try:
        code, _, err = run_command(capsys, recorded.output, "--step", 2)
    finally:
        path.write_bytes(before)
    assert code == 1 and not missing_facts(err, "error", "reference.logprobs")


def test_overrides_print_the_metrics_that_they_change(
    recorded: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override = "actor.loss.clip_low=0.01"
    code, out, err = run_command(capsys, recorded.output, "--step", 2, "--output", tmp_path / "out", override)
    assert (code, err) == (0, "") and override in out and not missing_facts(out, "recorded", "replayed")
    cells = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    changed = {row[1]: row[2:4] for row in cells if len(row) == 5 and row[1].startswith("actor/")}
    assert changed and all(recorded_value != replayed_value for recorded_value, replayed_value in changed.values())
    result = json.loads((tmp_path / "out" / RESULT).read_text())
    assert result["overrides"] == [override] and not result["is_identical"]


def test_an_override_without_effect_is_reported_as_identical(
    recorded: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command(capsys, recorded.output, "--step", 2, "health.steps=7")
    assert (code, err) == (0, "") and "bitwise identical" in out


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--step", 7], ["7", "1", "2"]),
        ([], ["1", "2", "--step"]),
        (["--step", 1, "--backend", "ray", "--pdb"], ["--backend", "--pdb"]),
        (["--step", 1, "--output", "."], ["--output"]),
        (["--step", 1, "--break", "flowrl.missing:function"], ["--break"]),
        (["--step", 1, "--break", "math:sin"], ["--break"]),
        (["--step", 1, "unknown=3"], ["unknown"]),
        (["--step", 1, "reference.model.path=missing"], ["reference.model.path"]),
    ],
)
def test_invalid_options_end_with_one_message(
    words: list[object], facts: list[str], recorded: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command(capsys, recorded.output, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and not missing_facts(err, *facts)


def test_folders_without_recordings_end_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, fact in ((tmp_path, "record"), (tmp_path / "missing", "missing")):
        code, _, err = run_command(capsys, folder, "--step", 3)
        assert code == 2 and err.count("\n") == 1 and fact in err


@pytest.mark.parametrize(
    ("corrupt", "fact"),
    [
        (lambda folder: (folder / BATCH).write_bytes(b""), BATCH),
        (lambda folder: (folder / BATCH).unlink(), BATCH),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json"),
        (lambda folder: next((folder / "actor").glob("*.bin")).write_bytes(b"x"), "actor"),
    ],
)
def test_a_corrupt_recording_ends_with_one_message(
    corrupt: Corruption, fact: str, recorded: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(recordings(recorded.output).path, tmp_path / "recorded")
    folder = recordings(tmp_path).folder(1)
    corrupt(folder)
    code, _, err = run_command(capsys, tmp_path, "--step", 1)
    assert code == 2 and err.count("\n") == 1 and fact in err and str(folder) in err


def converse(words: list[str], answers: list[str]) -> tuple[int, str]:
    """Runs `flowrl replay` in a terminal, and sends one answer after each prompt of the debugger."""
    terminal, child = pty.openpty()
    command = [sys.executable, "-m", "flowrl.cli", "replay", *words]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=os.environ | {"TERM": "dumb"})
    os.close(child)
    text, deadline_s, position = "", time.monotonic() + 300, 0
    while time.monotonic() < deadline_s:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            text += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # the program has ended
            break
        if answers and "(Pdb) " in text[position:]:
            position = len(text)
            os.write(terminal, f"{answers.pop(0)}\n".encode())
    process.kill()
    os.close(terminal)
    return process.wait(), text


@pytest.mark.slow
def test_the_debugger_stops_at_the_start_of_the_step(recorded: RunConfig) -> None:
    code, text = converse([str(recorded.output), "--step", "2", "--pdb"], ["p run.step, len(batch)", "continue"])
    assert "recipes/ppo/train.py" in text and "(2, 32)" in text and "bitwise identical" in text
    assert code == 0


@pytest.mark.slow
def test_the_debugger_stops_in_a_function_of_a_worker(recorded: RunConfig) -> None:
    words = [str(recorded.output), "--step", "1", "--break", "flowrl.workers.critic:Critic.values"]
    code, text = converse(words, ["p batch.keys()", "quit"])
    assert "critic.py" in text and code == 1
    assert "nothing is compared" in text


@pytest.mark.slow
def test_the_debugger_opens_where_an_exception_is_raised(recorded: RunConfig) -> None:
    words = [str(recorded.output), "--step", "1", "--pdb", "algorithm.kl_kind=tests.run.replay.failing:fail"]
    code, text = converse(words, ["continue", "p reason", "quit"])
    assert "'the estimate fails'" in text and code == 1
