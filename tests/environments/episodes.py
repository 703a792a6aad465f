"""Environments of several turns. Some misbehave as the column `kind` of a row states."""

import asyncio
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Any

from flowrl.environments.base import ChatMessage, ModelResponse, Observation, Row
from tests.user_code.misbehaving import ACTIONS

RETURNED = (
    "none", "nan", "infinite", "text", "complex", "large", "too_large", "no_number", "no_messages", "no_role",
    "no_content", "nan_reward", "text_reward", "object_info", "circular_info", "large_message", "number_messages",
)  # fmt: skip
"""Kinds whose value is the result of `step`."""

MESSAGE = {"role": "user", "content": "go on"}


def make_circular() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


OBSERVATIONS: dict[str, Any] = {
    "no_messages": lambda: Observation([]),
    "no_role": lambda: Observation([{"content": "a"}]),
    "no_content": lambda: Observation([{"role": "user", "content": 1}]),
    "number_messages": lambda: Observation(3),  # type: ignore[arg-type]
    "nan_reward": lambda: Observation([MESSAGE], float("nan")),
    "text_reward": lambda: Observation([MESSAGE], "1"),  # type: ignore[arg-type]
    "object_info": lambda: Observation([MESSAGE], info={"a": object()}),
    "circular_info": lambda: Observation([MESSAGE], info=make_circular()),
    "large_message": lambda: Observation([{"role": "user", "content": "x" * (1 << 21)}]),
}


class Game:
    """Three turns, with the reward 1 in the last one. Sync."""

    def __init__(self, folder: str = "", wait_s: float = 0.0) -> None:
        self._folder, self._wait_s = folder, wait_s
        self._kind, self._is_running = "", False

    def reset(self, row: Row) -> Sequence[ChatMessage]:
        self._kind = row.get("kind", "")
        self._act("reset")
        return [{"role": "user", "content": str(row.get("prompt", "start"))}]

    def step(self, response: ModelResponse) -> Observation:
        assert not self._is_running, "calls of an episode do not overlap"
        self._is_running = True
        time.sleep(self._wait_s)
        value: Any = self._act("step") if response.turn == 0 else None
        self._is_running = False
        if response.turn == 0 and self._kind in RETURNED:
            return value
        return Observation([MESSAGE], 1.0, True) if response.turn == 2 else Observation([MESSAGE])

    def close(self) -> None:
        if self._folder:
            with open(os.path.join(self._folder, "closed"), "a") as file:
                file.write("x")
        self._act("close")

    def _act(self, where: str) -> Any:
        name, _, at = self._kind.partition("@")
        if (at or "step") != where or not name:
            return None
        if name in ("async_hang", "not_cancelled", "cancelled", "tokens"):
            return None
        if name in OBSERVATIONS:
            return OBSERVATIONS[name]()
        if name == "slow":
            return time.sleep(1.6)
        return ACTIONS[name]()


class AsyncGame(Game):
    """The same in the event loop."""

    async def reset(self, row: Row) -> Sequence[ChatMessage]:  # type: ignore[override]
        if row.get("kind") == "tokens":
            return [1, 2, 3]  # type: ignore[return-value]
        return super().reset(row)

    async def step(self, response: ModelResponse) -> Observation:  # type: ignore[override]
        await asyncio.sleep(self._wait_s)
        if response.turn == 0 and self._kind == "async_hang":
            self._kind = ""
            await asyncio.sleep(600)
        while response.turn == 0 and self._kind == "not_cancelled":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                continue
        if response.turn == 0 and self._kind == "cancelled":
            raise asyncio.CancelledError
        return super().step(response)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class ToolGame(AsyncGame):
    """Observations with another role than `user`."""

    observation_roles = ("tool", "user")


class BadStart(Game):
    """Returns the column `start` from `reset`."""

    def reset(self, row: Row) -> Any:
        return row["start"]


def bad_constructor() -> Game:
    raise RuntimeError("no constructor")


class Slow:
    """Asks `turns` times. If `is_slow`, a step takes 0.05 to 1 s (log-normal with the median 0.22 s)."""

    def __init__(self, turns: int, is_slow: bool) -> None:
        self.turns, self.is_slow = turns, is_slow

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.rng = random.Random(row["number"])
        return [{"role": "user", "content": "1"}]

    async def step(self, response: ModelResponse) -> Observation:
        if self.is_slow:
            await asyncio.sleep(min(1.0, max(0.05, math.exp(self.rng.gauss(math.log(0.22), 0.7)))))
        return Observation([{"role": "user", "content": "2"}], reward=1.0, done=response.turn + 1 == self.turns)

    async def close(self) -> None:
        pass
