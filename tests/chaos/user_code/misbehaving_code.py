"""The reward functions, environments and tools of the runs.

They misbehave for some rows, as the column `kind` of the row states. With the kind `zero`, the calls for these rows
return 0.
"""

import asyncio
import os
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.environments.base import ChatMessage, ModelResponse, Observation, conversation_of
from recipes.quickstart import task
from tests.chaos.user_code.misbehavior_kinds import HARMLESS, ZERO
from tests.environments.episodes import OBSERVATIONS
from tests.user_code.misbehaving import ACTIONS

ONE_IN = 8
"""Inverse share of the rows that are chosen, on average."""


def is_chosen(*texts: str) -> bool:
    """Returns whether the calls for a row misbehave. `texts` are its prompt, and for a reward also the response."""
    return zlib.crc32(" ".join(texts).encode()) % ONE_IN == 0


def connect(port: int) -> float:
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return 1.0


def read_secrets() -> float:
    """Raises an exception if a variable of the driver's environment can be read."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if b"FLOWRL_CHAOS=" in content:
            raise RuntimeError(f"{path} has a variable of the driver")
    return 1.0


def leave_files() -> float:
    for _ in range(10):
        os.write(tempfile.mkstemp()[0], b"x" * (1 << 20))
    return 1.0


OWN_ACTIONS: dict[str, Callable[[], Any]] = {
    ZERO: lambda: 0.0,
    "secrets": read_secrets,
    "files": leave_files,
    "long_result": lambda: "x" * 10**7,
}


def act(kind: str, port: int) -> Any:  # Any: not always a number
    """Misbehaves, and returns the result of the call."""
    action = kind.partition("@")[0]
    return connect(port) if action == "network" else (OWN_ACTIONS | ACTIONS | OBSERVATIONS)[action]()


async def act_async(kind: str, port: int) -> Any:  # Any: not always a number
    """Misbehaves like `act`, or waits without end."""
    action = kind.partition("@")[0]
    while action in ("wait", "not_cancelled"):
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            if action == "wait":
                raise
    return act(kind, port)


# Reward functions.


def score(prompt: str, response: str, answer: str, kind: str, port: int) -> Any:
    """The score of the quickstart."""
    if kind.endswith("@always") or (kind and is_chosen(prompt, response)):
        result = act(kind, port)
        if kind not in HARMLESS:
            return result
    return task.score(prompt, response, answer)


async def score_async(prompt: str, response: str, answer: str, kind: str, port: int) -> Any:
    """`score` as an async function."""
    await asyncio.sleep(0.01)
    if kind and is_chosen(prompt, response):
        return await act_async(kind, port)
    return task.score(prompt, response, answer)


def score_batch(
    prompt: list[str], response: list[str], answer: list[str], kind: list[str], port: list[int]
) -> list[float]:
    """`score` of several rows. The result lacks the scores of chosen rows."""
    rows = zip(prompt, response, answer, strict=True)
    return [task.score(*row) for row in rows if not is_chosen(*row[:2])]


# Environments.


class TwoTurns:
    """Asks the question of the row, and then another question. Each answer has a score. Misbehaves in the first turn,
    or in the method after `@`.
    """

    observation_roles = ("user",)

    async def reset(self, row: Mapping[str, Any]) -> Sequence[ChatMessage]:
        self.row, self.kind, self.port = row, row["kind"], row["port"]
        self.is_chosen = bool(self.kind) and is_chosen(row["prompt"])
        if self.is_chosen and self.kind.endswith("@reset"):
            act(self.kind, self.port)
        return conversation_of(row)

    async def step(self, response: ModelResponse) -> Observation:
        if self.misbehaves_in(response) and self.kind != "hang":
            result = await act_async(self.kind, self.port)
            if self.kind not in HARMLESS:
                return Observation(reward=0.0, done=True) if self.kind == ZERO else result
        return self.observe(response)

    def misbehaves_in(self, response: ModelResponse) -> bool:
        return self.is_chosen and not response.turn and not self.kind.endswith(("@reset", "@close"))

    def observe(self, response: ModelResponse) -> Observation:
        reward = task.score(self.row["prompt"], response.text, self.row["answer"])
        return Observation([{"role": "user", "content": "1+1="}], reward / 2, done=response.turn == 1)

    async def close(self) -> None:
        if self.is_chosen and self.kind.endswith("@close"):
            await asyncio.sleep(600)


class TwoTurnsInThreads(TwoTurns):
    """`TwoTurns` whose method `step` is not async."""

    def step(self, response: ModelResponse) -> Observation:  # type: ignore[override]
        if self.misbehaves_in(response):
            time.sleep(600)
        return self.observe(response)


# Tools.


def look_up(prompt: str, kind: str, port: int) -> Any:
    """Returns the number 7."""
    is_misbehaving = kind and not kind.endswith("@async") and kind != "wait" and is_chosen(prompt)
    result = act(kind, port) if is_misbehaving else 7
    return 7 if kind in HARMLESS else result


async def look_up_async(prompt: str, kind: str, port: int) -> Any:
    """Returns the number 8."""
    is_misbehaving = (kind.endswith("@async") or kind == "wait") and is_chosen(prompt)
    return await act_async(kind, port) if is_misbehaving else 8
