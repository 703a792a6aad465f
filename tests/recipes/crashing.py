"""The score of the quickstart, which raises after the number of calls set in the environment."""

import os
import signal

from recipes.quickstart import task

CRASH_AT, ASK_AT = "FLOWRL_TEST_CRASH_AT", "FLOWRL_TEST_ASK_AT"
"""Environment variables: the call of `score` in this process that raises, and the one in which Ctrl-C is pressed."""

_calls = [0]


def reset_calls() -> None:
    """Resets the number of calls to 0."""
    _calls[0] = 0


def score(prompt: str, response: str, answer: str, **columns: object) -> float:
    _calls[0] += 1
    if str(_calls[0]) == os.environ.get(CRASH_AT):
        raise RuntimeError("crash requested by the environment")
    if str(_calls[0]) == os.environ.get(ASK_AT):
        signal.raise_signal(signal.SIGINT)
    return task.score(prompt, response, answer, **columns)
