"""Rewards of soak.py, which take some time, so that a killed process often runs a call."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from flowrl.environments.base import ModelResponse, Observation
from tests.recipes.turns import OneTurn

CALL_S = 0.05


def parity(response: str) -> float:
    """Returns 1 for responses of odd length, otherwise 0, so that some groups have equal scores."""
    time.sleep(CALL_S)
    return float(len(response) % 2)


class Parity(OneTurn):
    """An environment of two turns. The reward is that of `parity` for the last response."""

    async def step(self, response: ModelResponse) -> Observation:
        await asyncio.sleep(CALL_S)
        if response.turn:
            return Observation(reward=float(len(response.text) % 2), done=True, info=dict[str, Any](reason="answer"))
        again: Mapping[str, Any] = {"role": "user", "content": "1+1="}
        return Observation([again], reward=0.0)
