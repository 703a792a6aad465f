"""Reward functions of the benchmarks. Imports little, because reward processes and TRL's environments import it."""

import asyncio
import time

RESPONSE = 32
"""Characters of each response that `score` receives."""

SLEEP_S = 0.1


def score(response: str) -> float:
    """Returns the fraction of capital letters of a response."""
    return sum(character.isupper() for character in response) / RESPONSE


def sleep(response: str) -> float:
    time.sleep(SLEEP_S)
    return float(len(response))


async def sleep_async(response: str) -> float:
    await asyncio.sleep(SLEEP_S)
    return float(len(response))


def sleep_batch(response: list[str]) -> list[float]:
    """Sleeps for the same time as one call per row of a function that is not batched."""
    time.sleep(SLEEP_S * len(response))
    return [float(len(text)) for text in response]


def no_operation(response: str) -> float:
    return float(len(response))
