"""Reward for math word problems: compares the last number of the response with the ground truth."""

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(prompt: str, response: str, answer: str, **columns: object) -> float:
    """Returns 1 if the last number in `response` equals the last number in `answer`, otherwise 0. Ignores commas in
    numbers.

    Raises `ValueError` if `answer` contains no number.
    """
    expected = _last_number(answer)
    if expected is None:
        raise ValueError(f"answer {answer!r} contains no number: correct the data, or use a different reward")
    return float(_last_number(response) == expected)


def extract_answer(response: str) -> str | None:
    """Returns the last number of a response, or None, for `evaluation.extract_answer`."""
    number = _last_number(response)
    return None if number is None else repr(number)


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
