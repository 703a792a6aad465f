"""`ToolEnvironment`: the policy calls tools until it answers, and a reward function scores the answer."""

import asyncio
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flowrl.environments.base import ChatMessage, ModelResponse, Observation, Row, conversation_of
from flowrl.environments.reward_environment import LoadedReward, response_columns
from flowrl.environments.tool_calls import ToolCall, ToolFormat, parse_response
from flowrl.environments.tools import load_tools, run_tool

_ORDER = (
    "max_turns", "truncated", "answer", "max_calls", "parse_error", "unknown_tool", "invalid_arguments",
    "tool_timeout", "tool_error", "result_truncated",
)  # fmt: skip
"""Reasons in the order of importance. `info["reason"]` is the first of those that have occurred."""


class ToolEnvironment:
    """An episode with tools. A response without a tool call is the answer and ends the episode.

    `info["counts"]` counts the events of a turn and its executed calls (`tool_call`). `info["reason"]` is the most
    important event, and `info["num_calls"]` is the number of executed calls of the episode so far.
    """

    def __init__(
        self,
        tools: Sequence[str],
        *,
        tool_format: ToolFormat = "hermes",
        reward: str | None = None,
        reward_options: Mapping[str, Any] | None = None,  # Any: values of JSON
        max_turns: int = 8,
        max_calls: int = 16,
        max_concurrent: int = 8,
        tool_timeout_s: float = 10.0,
        max_result_chars: int = 4000,
        columns: Sequence[str] = (),
        result_role: Literal["tool", "user"] = "tool",
    ) -> None:
        """Imports the tools and the reward function.

        Args:
            tools: `module:function` or `file.py:function` of each tool.
            tool_format: format of the calls in a response.
            reward: `module:function` that scores the answer. It also receives the columns `num_calls` and
                `num_turns`. None: override `score`.
            reward_options: further keyword arguments of the reward function.
            max_turns: number of responses. If the last one calls tools, the episode ends without an answer.
            max_calls: number of executed calls. Further calls get an error message.
            max_concurrent: number of calls of a response that run at the same time.
            tool_timeout_s: time of a call.
            max_result_chars: length of a result.
            columns: columns of the row that tools receive as parameters of the same name, hidden from the policy.
            result_role: role of the messages with results.
        Raises:
            UserError: a tool or the reward function cannot be loaded.
        """
        if min(max_turns, max_concurrent, max_result_chars) < 1 or max_calls < 0 or tool_timeout_s <= 0:
            raise ValueError("max_turns, max_concurrent, max_result_chars, and tool_timeout_s must be positive")
        loaded = _load_tools(tuple(tools), tuple(columns))
        self._tools = {tool.name: tool for tool in loaded}
        self.tools = [tool.schema for tool in loaded]
        self._reward = None if reward is None else LoadedReward(reward, reward_options)
        self._format: ToolFormat = tool_format
        self._max_turns, self._max_calls = max_turns, max_calls
        self._max_concurrent = max_concurrent
        self._tool_timeout_s, self._max_result_chars = tool_timeout_s, max_result_chars
        self._result_role = result_role
        self.observation_roles = (result_role,)
        self._row: Row = {}
        self._num_calls = 0

    async def reset(self, row: Row) -> Sequence[ChatMessage]:
        self._row, self._num_calls = row, 0
        return conversation_of(row)

    async def step(self, response: ModelResponse) -> Observation:
        counts: Counter[str] = Counter()
        if response.finish_reason == "length":
            counts["truncated"] += 1
            return await self._end(response, counts)
        parsed = parse_response(response.parsed_text, self._format)
        counts["parse_error"] += len(parsed.errors)
        if not parsed.calls and not parsed.errors:
            counts["answer"] += 1
            return await self._end(response, counts)
        if response.turn + 1 >= self._max_turns:
            counts["max_turns"] += 1
            return await self._end(response, counts)
        allowed = parsed.calls[: self._max_calls - self._num_calls]
        self._num_calls += len(allowed)
        counts["tool_call"] = len(allowed)
        messages = [*await self._run_calls(allowed, counts)]
        for call in parsed.calls[len(allowed) :]:
            counts["max_calls"] += 1
            messages.append(self._message(call.name, "Error: no tool calls are left. Answer without tools."))
        messages += [self._message(None, f"Error: {error}") for error in parsed.errors]
        return Observation(messages, info=self._info(counts))

    async def _run_calls(self, calls: Sequence[ToolCall], counts: Counter[str]) -> Sequence[ChatMessage]:
        """Returns the results of the calls, in their order."""
        limit = asyncio.Semaphore(self._max_concurrent)

        async def run(call: ToolCall) -> ChatMessage:
            async with limit:
                text, problem = await run_tool(
                    self._tools,
                    call,
                    timeout_s=self._tool_timeout_s,
                    max_chars=self._max_result_chars,
                    bound=self._row,
                )
            if problem is not None:
                counts[problem] += 1
            return self._message(call.name, text)

        return await asyncio.gather(*map(run, calls))

    def _message(self, name: str | None, content: str) -> ChatMessage:
        is_known = self._result_role == "tool" and name in self._tools
        return {"role": self._result_role, **({"name": name} if is_known else {}), "content": content}

    async def _end(self, response: ModelResponse, counts: Counter[str]) -> Observation:
        reward = await self.score(response, is_answer="answer" in counts)
        return Observation(reward=reward, done=True, info=self._info(counts))

    async def score(self, response: ModelResponse, *, is_answer: bool) -> float:
        """Returns the reward of the episode. An episode without an answer has 0.

        Args:
            response: the last response.
            is_answer: false if the episode has ended by a limit.
        """
        if not is_answer:
            return 0.0
        assert self._reward is not None, "a ToolEnvironment without `reward` must override `score`"
        counts = {"num_calls": self._num_calls, "num_turns": response.turn + 1}
        return await self._reward.score({**self._row, **response_columns(response), **counts})

    def _info(self, counts: Counter[str]) -> dict[str, Any]:
        occurred = {name: counts[name] for name in _ORDER if counts[name]}
        # Also 0, so that every log has the number of calls.
        num_calls = {"tool_call": counts["tool_call"]}
        info: dict[str, Any] = {"counts": num_calls | occurred, "num_calls": self._num_calls}
        return info | ({"reason": next(iter(occurred))} if occurred else {})

    async def close(self) -> None:
        pass


_load_tools = functools.lru_cache(load_tools)
