"""Environments of the tests of episodes."""

import asyncio
import os
import signal
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.environments.base import ModelResponse, Observation, conversation_of
from recipes.quickstart.task import score
from tests.recipes.scored import fails_for_response, parity


class OneTurn:
    """The reward of the quickstart."""

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        self.row = row
        return conversation_of(row)

    async def step(self, response: ModelResponse) -> Observation:
        return Observation(reward=score(self.row["prompt"], response.text, self.row["answer"]), done=True)

    async def close(self) -> None:
        pass


class TwoTurns(OneTurn):
    """Asks the question again after the first response. Each turn has a reward."""

    observation_roles = ("user",)

    async def step(self, response: ModelResponse) -> Observation:
        await asyncio.sleep(0.001)
        reward = score(self.row["prompt"], response.text, self.row["answer"])
        if response.turn:
            return Observation(reward=reward, done=True, info={"reason": "answer", "counts": {"answer": 1}})
        return Observation([{"role": "user", "content": "1+1="}], reward=reward / 2, info={"counts": {"again": 1}})


class Parity(OneTurn):
    """The reward function `scored.parity` with a counted event."""

    async def step(self, response: ModelResponse) -> Observation:
        reward = parity(prompt=self.row["prompt"], response=response.text)
        return Observation(reward=reward, done=True, info={"counts": {"odd": int(reward)}})


class ParityOfTwoTurns(OneTurn):
    """Asks again after the first response, and scores the second with `scored.parity`. Raises for some responses."""

    observation_roles = ("user",)

    async def step(self, response: ModelResponse) -> Observation:
        if not response.turn:
            return Observation([{"role": "user", "content": "1+1="}], reward=0.0, info={"counts": {"again": 1}})
        if fails_for_response(response.text):
            raise RuntimeError("unlucky")
        return Observation(reward=parity(self.row["prompt"], response.text), done=True, info={"counts": {"answer": 1}})


class Unlucky(OneTurn):
    """Raises for every third problem. Other episodes have the score 1."""

    async def step(self, response: ModelResponse) -> Observation:
        if sum(map(ord, self.row["prompt"] + response.text)) % 3 == 0:
            raise RuntimeError("unlucky")
        return Observation(reward=1.0, done=True)


class KilledOnce(OneTurn):
    """Kills its process in the first step of all episodes."""

    def __init__(self, folder: str) -> None:
        self.killed = Path(folder, "killed")

    async def step(self, response: ModelResponse) -> Observation:
        if not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(response)


class Deadly(OneTurn):
    """Kills its process in each step of every eighth prompt, while other episodes are in a step."""

    @staticmethod
    def kills_for(prompt: str) -> bool:
        return zlib.crc32(prompt.encode()) % 8 == 0

    async def step(self, response: ModelResponse) -> Observation:
        await asyncio.sleep(0.1)
        if self.kills_for(self.row["prompt"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(response)


class Reversed(OneTurn):
    """Asks for the sum of the digits in reverse order."""

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        await super().reset(row)
        return [{"role": "user", "content": row["prompt"][::-1]}]
