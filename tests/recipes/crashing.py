"""The quickstart's score, until the environment says that it is enough."""

import os
import signal

from recipes.quickstart import task

CRASH_AT, ASK_AT = "FLOWRL_TEST_CRASH_AT", "FLOWRL_TEST_ASK_AT"
"""Environment variables: the call of `score` in this process that raises, and the one in which Ctrl-C is pressed."""

_calls = [0]


def begin_again() -> None:
    """Counts from 0 again."""
    _calls[0] = 0


def score(prompt: str, response: str, answer: str, **columns: object) -> float:
    _calls[0] += 1
    if str(_calls[0]) == os.environ.get(CRASH_AT):
        raise RuntimeError("crashed as asked")
    if str(_calls[0]) == os.environ.get(ASK_AT):
        signal.raise_signal(signal.SIGINT)
    return task.score(prompt, response, answer, **columns)
