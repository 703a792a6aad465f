"""A reward function for tests."""


def count_letters(response: str, **columns: object) -> float:
    return float(len(response))
