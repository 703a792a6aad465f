"""`flowrl chat` as a program: commands, wrong commands, a terminal, and Ctrl-C."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "80"}


def test_lines_of_standard_input_are_messages_and_commands(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        *("/retry", "/undo", "/unknown", "/temperature hot", "/compare", "/compare nowhere", "/save"),
        *("/temperature 0", "1+1=", "2+2=", "/undo", "/save one.jsonl", "/save one.jsonl"),
        *(f"/compare {run_folder}", "3+3=", "/save two.jsonl", "/reset", "/system S", "/help", "/exit", "4+4="),
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    code = main(["chat", str(run_folder), "--max-tokens", "5"])
    output, notices = capsys.readouterr()
    assert code == 0, notices
    assert notices.count("error: ") == 8
    assert all(text in notices for text in ("/retry needs", "/unknown", "'hot'", "nowhere", "already exists"))
    (saved,) = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert [turn["content"] for turn in saved["messages"] if turn["role"] == "user"] == ["1+1="]
    first, second = (json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines())
    assert first["messages"] == second["messages"] and len(first["messages"]) == 4
    responses = [turn["content"] for turn in first["messages"] if turn["role"] == "assistant"]
    assert output.startswith(f"{responses[0]}\n")
    assert output.count(f"full: {responses[1]}\n") == 2 and "/temperature T" in output


def read_until(terminal: int, text: str, timeout_s: float = 300) -> str:
    """Returns the output of a terminal up to a text."""
    output, deadline = "", time.monotonic() + timeout_s
    while text not in output:
        assert time.monotonic() < deadline, output
        if select.select([terminal], [], [], 1)[0]:
            output += os.read(terminal, 4096).decode(errors="replace")
    return output


def interrupt_until(terminal: int, pid: int, text: str) -> None:
    """Sends SIGINT until a text is written. readline shows its prompt before it can be interrupted."""
    for _ in range(60):
        os.kill(pid, signal.SIGINT)
        with suppress(AssertionError):
            read_until(terminal, text, timeout_s=5)
            return
    raise AssertionError(f"no {text!r} within 60 signals")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ctrl_c_stops_a_response_and_not_the_chat(run_folder: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "flowrl.cli", "chat", str(run_folder), "--max-tokens", "100000"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=ENVIRONMENT, start_new_session=True
    )
    os.close(slave)
    read_until(master, "> ")
    interrupt_until(master, process.pid, "ends the chat")
    os.write(master, b"1+1=\n")
    read_until(master, "1+1=\r\n")
    os.kill(process.pid, signal.SIGINT)
    read_until(master, "> ")
    os.write(master, b"/exit\n")
    assert process.wait(timeout=60) == 0
    os.close(master)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_chat_and_deletes_the_exported_model(
    run_folder: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "flowrl.cli", "chat", str(run_folder), "--step", "1"]
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"/help\n")
        process.stdin.flush()
        assert b"/system" in process.stdout.readline()
        assert list(tmp_path.glob("flowrl-model-*")) != []
        process.send_signal(number)
        assert process.wait(timeout=60) == code
    assert list(tmp_path.glob("flowrl-*")) == []
