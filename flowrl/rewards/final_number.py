"""Reward for math word problems: compares the last number of the response with the ground truth."""

from flowrl.rewards.numbers import canonical_text, last_number, read_reference


def score(prompt: str, response: str, answer: object, **columns: object) -> float:
    """Returns 1 if the last number in `response` equals the number in `answer`, otherwise 0.

    The comparison is exact. docs/rewards.md describes the forms of numbers.

    Args:
        prompt: ignored.
        response: the text.
        answer: a number, text with one number, or a solution that ends with `####` and one number.
        columns: ignored.
    Raises:
        ValueError: `answer` contains no number or several.
    """
    return float(last_number(response) == read_reference(answer))


def extract_answer(response: str) -> str | None:
    """Returns the last number of a response, or None, for `evaluation.extract_answer`.

    Equal numbers have equal texts: `1e3`, `1,000` and `1000.0` all become `1000`.
    """
    number = last_number(response)
    return None if number is None else canonical_text(number)
