"""The reward of all programs of `tests.benchmarks.step`. Imports nothing, because a reward process imports it."""

RESPONSE = 32
"""Characters of each response."""


def score(response: str) -> float:
    """Returns the fraction of capital letters of a response."""
    return sum(character.isupper() for character in response) / RESPONSE
