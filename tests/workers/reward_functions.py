"""Reward functions of tests."""


def exact(prompt: str, response: str, answer: str, **columns: object) -> float:
    return float(response == answer)


def weighted(prompt: str, response: str, answer: str, weight: float, **columns: object) -> float:
    return weight * (response == answer)


def broken(**columns: object) -> float:
    return float("nan")


def of_columns(response: str, weight: float) -> float:
    return weight * len(response)


def num_messages(prompt: str, response: str, conversation: list[dict[str, str]], **columns: object) -> float:
    assert conversation[-1] == {"role": "user", "content": prompt}
    return float(len(conversation))


def source_length(prompt: str, response: str, data_source: str, **columns: object) -> float:
    return float(len(data_source))


def minimal(prompt: str, response: str, answer: str) -> float:
    return float(response == answer)


def needs_digit(response: str) -> float:
    return float(int(response))
