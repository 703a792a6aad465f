"""Scores rows in a separate process with a timeout, so that a reward function that hangs can be stopped."""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from flowrl.rewards import reward_function
from flowrl.rewards.reward_function import RewardError, accepted_columns, load_reward_function, score_row

_POLL_S = 0.5
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')


def score_in_process(name: str, rows: Sequence[Mapping[str, Any]], timeout_s: float | None) -> list[float]:
    """Returns the scores of the rows, computed in a new process.

    Calls the reward function `name` once per row, with the columns that it accepts. Raises RewardError if the function
    cannot be loaded, a score is invalid, the process ends, or the import or the calls take longer than `timeout_s`
    (None: no limit). After a timeout, the error names the current function and line. All processes that the function
    has started are ended.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="flowrl-stack-") as stack, receiver:
        process = context.Process(target=_score, args=(name, rows, timeout_s, sender, stack.name))
        # start() starts the resource tracker if there is none, which would unblock the signal.
        resource_tracker.ensure_running()
        # The scoring process inherits the signal mask, so that Ctrl-C reaches only this process, which then kills the
        # scoring process.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with sender:
                process.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            result = _receive(receiver, process.is_alive)
            if isinstance(result, list):
                return result
            if result is None:
                process.join()
                assert process.exitcode is not None
                result = _describe_end(name, len(rows), timeout_s, Path(stack.name), process.exitcode)
            raise RewardError(result)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if process.pid is not None:
                process.kill()
                process.join()
                # Processes that the function has started, such as a sandbox, are in the group of its process.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _receive(receiver: Connection, is_alive: Any) -> list[float] | str | None:  # Any: a bound method of a process
    """Returns the scores or an error message, or None if the process has ended without either."""
    # EOF does not show the end of the process, because child processes of the reward function may hold the pipe open.
    while not receiver.poll(_POLL_S) and is_alive():
        pass
    try:
        return receiver.recv() if receiver.poll() else None
    except EOFError:
        return None


def _describe_end(name: str, num_rows: int, timeout_s: float | None, stack: Path, exit_code: int) -> str:
    """Returns why the process has ended without scores."""
    if text := stack.read_text(errors="replace"):
        return (
            f"reward function {name} did not score {num_rows} responses within {timeout_s:g} s{_find_location(text)}: "
            f"make it faster, or increase call_timeout_s"
        )
    if exit_code >= 0:
        return (
            f"reward function {name} ended its process with exit code {exit_code}: return a number or raise an "
            f"exception"
        )
    number = signal.Signals(-exit_code)
    cause = "sender unknown" if number is signal.SIGKILL else signal.strsignal(number)
    return f"the process of reward function {name} was killed by {number.name} ({cause})"


def _find_location(stacks: str) -> str:
    """Returns the innermost frame below `score_row` as text, or an empty text if `stacks` has none."""
    for thread in stacks.split("\n\n"):
        frames = [match.groupdict() for match in map(_FRAME.fullmatch, thread.splitlines()) if match]
        depth = next((i for i, frame in enumerate(frames) if frame["file"] == reward_function.__file__), 0)
        if depth:
            return "; at the timeout it was in {function} ({file}, line {line})".format(**frames[0])
    return ""


def _score(
    name: str, rows: Sequence[Mapping[str, Any]], timeout_s: float | None, sender: Connection, stack: str
) -> None:
    """Sends the scores or an error message. At the timeout, writes the stacks of all threads and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches processes that unblock the signal
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with Path(stack).open("w") as file, _deadline(timeout_s, file):
            function = load_reward_function(name)
        accepted = [{column: row[column] for column in accepted_columns(function, row)} for row in rows]
        with Path(stack).open("w") as file, _deadline(timeout_s, file):
            scores = [score_row(function, name, row) for row in accepted]
    except RewardError as error:
        sender.send(str(error))
    else:
        sender.send(scores)


@contextlib.contextmanager
def _deadline(timeout_s: float | None, file: TextIO) -> Iterator[None]:
    """Writes the stacks to `file` and ends the process if the block takes longer than `timeout_s`."""
    if timeout_s is not None:
        faulthandler.dump_traceback_later(timeout_s, file=file, exit=True)  # also if native code hangs
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
