"""Tools and environments of the tests of timeouts. They hang for half of the prompts."""

import asyncio
import threading
import zlib

from flowrl.environments.base import ModelResponse, Observation
from tests.recipes.turns import OneTurn


def hangs_for(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 2 == 0


def look_up(prompt: str) -> str:
    """Returns a word, or hangs in a thread."""
    if hangs_for(prompt):
        threading.Event().wait()
    return "seven"


async def look_up_async(prompt: str) -> str:
    """Returns a word, or hangs in the event loop."""
    if hangs_for(prompt):
        await asyncio.Event().wait()
    return "eight"


class Hanging(OneTurn):
    """Two turns. The first one hangs without end."""

    observation_roles = ("user",)

    async def step(self, response: ModelResponse) -> Observation:
        if hangs_for(self.row["prompt"]) and not response.turn:
            await asyncio.Event().wait()
        return self.observe(response)

    def observe(self, response: ModelResponse) -> Observation:
        return Observation([{"role": "user", "content": "again"}], reward=1.0, done=response.turn == 1)


class HangingInThreads(Hanging):
    """The step of the first turn hangs in a thread, so that it also delays the next step."""

    def step(self, response: ModelResponse) -> Observation:  # type: ignore[override]
        if hangs_for(self.row["prompt"]) and not response.turn:
            threading.Event().wait(3.0)
        return self.observe(response)
