"""Rewards of soak.py, which take some time, so that a killed process often runs a call."""

import asyncio
import time
import zlib

from flowrl.environments.base import ModelResponse, Observation
from tests.recipes.turns import OneTurn

CALL_S = 0.05


def random_bit(prompt: str, response: str) -> float:
    """Returns 0 or 1, which is different for about half of the responses, so that no policy makes all scores equal."""
    return float(zlib.crc32(f"{prompt} {response}".encode()) % 2)


def score(prompt: str, response: str) -> float:
    """Returns the random bit of a response after some time."""
    time.sleep(CALL_S)
    return random_bit(prompt, response)


class AskTwice(OneTurn):
    """An environment of two turns. The reward is the random bit of the last response."""

    async def step(self, response: ModelResponse) -> Observation:
        await asyncio.sleep(CALL_S)
        if response.turn:
            return Observation(reward=random_bit(self.row["prompt"], response.text), done=True)
        return Observation([{"role": "user", "content": "1+1="}])
