"""Functions for `evaluation.extract_answer`, some of which misbehave. Processes load them fast."""

import os
import time
from typing import Any


def first_word(response: str) -> str | None:
    return next(iter(response.split()), None)


def padded(text: str) -> str:
    return f"  {text} \n"


def process_id(response: str) -> str:
    return str(os.getpid())


def variable(response: str) -> str | None:
    """Returns the value of the environment variable whose name is the response."""
    return os.environ.get(response)


def number(response: str) -> Any:
    return 4


def fail(response: str) -> str:
    raise ValueError(f"no answer in {response}")


def end_process(response: str) -> str:
    os._exit(3)


def end_program(response: str) -> str:
    raise SystemExit(7)


def hang(response: str) -> str:
    time.sleep(600)
    return response


def allocate(response: str) -> str:
    return str(len(bytearray(10**11)))


async def wait(response: str) -> str:
    return response
