"""A reward for word problems: whether the response ends at the right number."""

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(prompt: str, response: str, answer: str, **columns: object) -> float:
    """1 if the last number in `response` equals the last one in `answer`, else 0; thousands commas are allowed in both.

    Raises: ValueError when `answer` holds no number.
    """
    wanted = _last_number(answer)
    if wanted is None:
        raise ValueError(f"answer {answer!r} holds no number to compare with: correct the data, or use another reward")
    return float(_last_number(response) == wanted)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
