"""Reward for GSM8K: compares the number after `####` with that of the solution."""

from flowrl.rewards.numbers import canonical_text, last_number, marked_number, read_reference


def score(response: str, answer: object, *, flexible: bool = False, **columns: object) -> float:
    """Returns 1 if the first number after the last `####` of `response` equals that of `answer`, otherwise 0.

    The comparison is exact. docs/rewards.md describes the forms of numbers.

    Args:
        response: the text.
        answer: a number, text with one number, or a solution that ends with `####` and one number.
        flexible: without `####` in the response, compares its last number.
        columns: ignored.
    Raises:
        ValueError: `answer` contains no number or several.
    """
    expected = read_reference(answer)
    is_marked = not flexible or "####" in response
    return float((marked_number if is_marked else last_number)(response) == expected)


def extract_answer(response: str) -> str | None:
    """Returns the first number after the last `####` of a response, or None, for `evaluation.extract_answer`.

    Equal numbers have equal texts: `1e3`, `1,000` and `1000.0` all become `1000`.
    """
    number = marked_number(response)
    return None if number is None else canonical_text(number)
