"""Environment functions of tests, right and wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def ask_again(texts: Sequence[str], answer: str) -> str | None:
    """Asks once more, after the first turn."""
    return "=" if len(texts) == 1 else None


def repeat(texts: Sequence[str]) -> str | None:
    """Returns the text of the first turn, then ends the response."""
    return texts[0] if len(texts) == 1 else None


def count_down(segments: Sequence[Any]) -> list[int] | None:
    """Returns 3, 2, 1 and no tokens, then ends the response."""
    turn = sum(segment.is_policy for segment in segments)
    return [5] * (4 - turn) if turn <= 4 else None


def end_at_once(segments: Sequence[Any]) -> None:
    return None


def long_output(segments: Sequence[Any]) -> list[int]:
    return [5] * 100


def as_array(segments: Sequence[Any]) -> Any:
    return np.array([5, 6])


def all_columns(texts: Sequence[str], **columns: Any) -> None:
    raise LookupError(" ".join(sorted(columns)))


def number(segments: Sequence[Any]) -> Any:
    return 1.5


def mixed(segments: Sequence[Any]) -> Any:
    return [3, "4"]


def raw_bytes(segments: Sequence[Any]) -> Any:
    return b"5"


def unknown_token(segments: Sequence[Any]) -> list[int]:
    return [5, 10_000]


def given(segments: Sequence[Any], value: Any) -> Any:
    return value


def failing(texts: Sequence[str], prompt: str = "") -> str:
    raise KeyError("no tool")


def unprintable(texts: Sequence[str]) -> str:
    raise Unprintable


def interrupted(texts: Sequence[str]) -> str:
    raise KeyboardInterrupt


class Unprintable(Exception):
    def __str__(self) -> str:
        raise OSError


def without_parameters(answer: str) -> str:
    return answer


async def asynchronous(texts: Sequence[str]) -> str:
    return "="


def positional(texts: Sequence[str], /) -> str:
    return "="


def unavailable(texts: Sequence[str], advantages: Any) -> str:
    return "="


def needs_hint(texts: Sequence[str], hint: str) -> str:
    return hint
