"""Reward for GSM8K: compares the number after `####` with that of the solution."""

import re
from decimal import Decimal

_NUMBER = re.compile(r"[-+]?\$?(\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARKER = "####"
_MAX_DIGITS = 1000


def score(response: str, answer: object, *, flexible: bool = False, **columns: object) -> float:
    """Returns 1 if the number after the last `####` of `response` equals that of `answer`, otherwise 0.

    Args:
        response: the text.
        answer: a number, or a solution that ends with `#### NUMBER`.
        flexible: without `####` in the response, compares its last number.
        columns: ignored.
    Raises:
        ValueError: `answer` contains no number.
    """
    expected = _last_number(str(answer).rpartition(_MARKER)[2])
    if expected is None:
        raise ValueError(f"answer {answer!r} contains no number: correct the data, or use another reward")
    _, marker, text = response.rpartition(_MARKER)
    if marker:
        return float(_first_number(text) == expected)
    return float(flexible and _last_number(text) == expected)


def extract_answer(response: str) -> str | None:
    """Returns the number after the last `####` of a response, or None, for `evaluation.extract_answer`."""
    _, marker, text = response.rpartition(_MARKER)
    number = _first_number(text) if marker else None
    return None if number is None else f"{number.normalize():f}"


def _first_number(text: str) -> Decimal | None:
    return _to_number(_NUMBER.search(text))


def _last_number(text: str) -> Decimal | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return _to_number(last)


def _to_number(match: re.Match[str] | None) -> Decimal | None:
    if match is None or len(match[0]) > _MAX_DIGITS:
        return None
    return Decimal(match[0].replace(",", "").replace("$", ""))
