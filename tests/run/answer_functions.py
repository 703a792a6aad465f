"""Functions for `evaluation.extract_answer`. They import little, so processes load them fast."""

import os
from typing import Any


def first_character(response: str) -> str | None:
    return response[0] if response[0] != "2" else None


def returns_number(response: str) -> Any:
    return 4


def end_process(response: str) -> str:
    os._exit(3)
