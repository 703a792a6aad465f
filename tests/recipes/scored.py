"""Reward functions of the tests of rewards: equal scores, failures, and slow calls."""

import json
import time
import zlib
from pathlib import Path
from typing import Any

from recipes.quickstart.task import score as task_score
from tests.user_code.misbehaving import ACTIONS


def parity(prompt: str, response: str) -> float:
    """Returns 1 or 0. Prompts that end with an even digit have only equal scores."""
    digits = [character for character in prompt if character.isdigit()]
    return float(int(digits[-1]) % 2 == 1 and len(response) % 2 == 1)


def parity_of_short_responses(prompt: str, response: str) -> float:
    """Returns `parity`, and fails for some prompts if the response is long."""
    if len(response) > 4 and ord(prompt[0]) % 3 == 0:
        raise ValueError("the response is too long")
    return parity(prompt, response)


def raises(prompt: str, response: str, answer: str, **columns: object) -> float:
    return 1 / 0


def of_a_missing_column(response: str, difficulty: int) -> float:
    return 0.0


def constant(response: str) -> float:
    return 1.0


def length(response: str) -> float:
    return float(len(response))


def fails_for_some_answers(response: str, answer: str) -> float:
    """Returns 1. Fails for about half of the answers."""
    if zlib.crc32(answer.encode()) % 2:
        raise RuntimeError("verifier crashed")
    return 1.0


def fail_for_long_responses(response: str) -> float:
    if len(response) > 4:
        raise ValueError("the response is too long")
    return float(len(response))


def fails_for_response(response: str) -> bool:
    """Returns whether `fails_for_some_responses` fails: for about every fourth response."""
    return zlib.crc32(response.encode()) % 4 == 0


def fails_for_some_responses(response: str) -> float:
    """Returns the length."""
    if fails_for_response(response):
        raise RuntimeError("verifier crashed")
    return float(len(response))


def slow(prompt: str, response: str, answer: str) -> float:
    time.sleep(0.02)
    return task_score(prompt, response, answer)


def logged(prompt: str, response: str, answer: str, folder: str = "") -> float:
    """Writes the time of each call to a file of `folder`."""
    with Path(folder, "calls").open("a") as file:
        file.write(f"{time.time()}\n")
    return task_score(prompt, response, answer)


def fails_once_marked(prompt: str, response: str, answer: str, folder: str = "", after: int = 0) -> float:
    """Fails from call number `after` on, while the file `fail` exists in `folder`."""
    calls = Path(folder, "calls")
    with calls.open("a") as file:
        file.write("x")
    if calls.stat().st_size > after and Path(folder, "fail").exists():
        raise ValueError("the service is down")
    return task_score(prompt, response, answer)


MIXED = ("hang", "none", "nan", "text", "exit", "kill", "print")
CALLS_BETWEEN = 9


def misbehaves_in_many_ways(prompt: str, response: str, answer: str, folder: str = "") -> Any:
    """Misbehaves in the way `MIXED[i]` in call number `CALLS_BETWEEN * i`. Writes the row to the file `MIXED[i]`."""
    index, rest = divmod(_count_call(Path(folder, "calls")), CALLS_BETWEEN)
    if rest or index >= len(MIXED):
        return task_score(prompt, response, answer)
    Path(folder, MIXED[index]).write_text(json.dumps([prompt, response]))
    return ACTIONS[MIXED[index]]()


def _count_call(folder: Path) -> int:
    """Returns the number of earlier calls in all processes."""
    folder.mkdir(exist_ok=True)
    number = 0
    while True:
        try:
            Path(folder, str(number)).touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number
