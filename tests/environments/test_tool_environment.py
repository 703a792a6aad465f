"""An episode with tools: calls, limits, and the reward of the answer."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from flowrl.environments.base import ModelResponse, Observation
from flowrl.environments.requests import Close, Reset, Step
from flowrl.environments.tool_environment import ToolEnvironment
from flowrl.rewards.reward_function import RewardError
from tests.environments.test_environment_host import ask, make_host, mark

__all__ = ["mark"]

MODULE = "tests.environments.calculator"
TOOLS = [f"{MODULE}:{name}" for name in ("add", "wait", "sleep", "lookup", "misbehave")]
ROW = {"prompt": "What is 1 + 2?", "answer": "3", "table": {"x": "y"}}


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def run(texts: Sequence[str], finish_reason: Literal["stop", "length"] = "stop", **options: Any) -> list[Observation]:
    """Plays an episode with these responses."""
    environment = ToolEnvironment(TOOLS, **{"reward": f"{MODULE}:score", "columns": ["table"], **options})

    async def play() -> list[Observation]:
        await environment.reset(ROW)
        responses = [ModelResponse(text, (), finish_reason, turn) for turn, text in enumerate(texts)]
        return [await environment.step(response) for response in responses]

    return asyncio.run(play())


def contents(observation: Observation) -> list[str]:
    return [message["content"] for message in observation.messages]


def test_an_answer_after_a_call_is_scored() -> None:
    first, second = run([hermes("add", a=1, b=2), "3"])
    assert list(first.messages) == [{"role": "tool", "name": "add", "content": "3"}]
    assert (first.done, first.reward) == (False, None)
    assert first.info == {"counts": {"tool_call": 1}, "num_calls": 1}
    assert (second.done, second.reward) == (True, 0.9)  # 1 - 0.1 per call
    assert second.info == {"reason": "answer", "counts": {"tool_call": 0, "answer": 1}, "num_calls": 1}


def test_an_async_reward_with_options_and_a_role_of_results() -> None:
    options = {"reward": f"{MODULE}:is_answer", "reward_options": {"bonus": 2.0}, "result_role": "user"}
    first, second = run([hermes("add", a=1), "3"], **options)
    assert list(first.messages) == [{"role": "user", "content": "1"}]
    assert second.reward == 3.0


def test_calls_of_a_response_run_concurrently_and_in_order() -> None:
    text = hermes("wait", seconds=0.2) * 20 + hermes("lookup", key="x")
    (observation,) = run([text], max_calls=30, max_concurrent=30, tool_timeout_s=3.0)
    assert contents(observation) == ["done"] * 20 + ["y"]
    (observation,) = run([hermes("wait", seconds=0.4) * 3], max_concurrent=1, tool_timeout_s=1.0)
    assert contents(observation) == ["done"] * 3  # the time of a call starts with the call


@pytest.mark.parametrize(
    ("text", "reason", "options"),
    [
        ("<tool_call>{", "parse_error", {}),
        (hermes("subtract", a=1), "unknown_tool", {}),
        (hermes("add", a="x"), "invalid_arguments", {}),
        (hermes("lookup", key="z"), "tool_error", {}),
        (hermes("misbehave", kind="system_exit"), "tool_error", {}),
        (hermes("wait", seconds=60), "tool_timeout", {"tool_timeout_s": 0.1}),
        (hermes("sleep", seconds=0.5), "tool_timeout", {"tool_timeout_s": 0.1}),
        (hermes("misbehave", kind="long"), "result_truncated", {}),
        (hermes("add", a=1), "max_calls", {"max_calls": 0}),
    ],
)
def test_a_problem_is_a_message_with_a_counted_reason(text: str, reason: str, options: dict[str, Any]) -> None:
    (observation,) = run([text], **options)
    assert not observation.done and len(observation.messages) == 1
    num_calls = 0 if reason in ("parse_error", "max_calls") else 1
    assert (observation.info["reason"], observation.info["counts"]) == (reason, {"tool_call": num_calls, reason: 1})


def test_calls_beyond_the_limit_are_not_executed() -> None:
    first, second = run([hermes("add", a=1) * 3, hermes("add", a=1)], max_calls=2)
    assert (first.info["counts"], first.info["num_calls"]) == ({"tool_call": 2, "max_calls": 1}, 2)
    assert contents(first)[:2] == ["1", "1"] and len(first.messages) == 3
    assert (second.info["counts"], second.info["num_calls"]) == ({"tool_call": 0, "max_calls": 1}, 2)


def test_a_call_in_the_last_turn_ends_the_episode_without_a_reward() -> None:
    _, last = run([hermes("add", a=1), hermes("add", a=1)], max_turns=2)
    assert (last.done, last.reward, last.info["reason"], last.info["num_calls"]) == (True, 0.0, "max_turns", 1)


def test_a_truncated_response_ends_the_episode_without_a_reward() -> None:
    (observation,) = run(["3"], finish_reason="length")
    assert (observation.done, observation.reward, observation.info["reason"]) == (True, 0.0, "truncated")


def test_an_invalid_reward_is_an_error() -> None:
    with pytest.raises(RewardError):
        run(["3"], reward=f"{MODULE}:invalid")


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError):
        ToolEnvironment(TOOLS, max_turns=0)


@pytest.mark.usefixtures("mark")
def test_an_episode_in_a_host() -> None:
    options = {"tools": TOOLS, "reward": f"{MODULE}:score", "columns": ["table"], "tool_timeout_s": 0.5}
    with make_host("flowrl.environments.tool_environment:ToolEnvironment", options) as host:
        start = ask(host, Reset(0, ROW))
        assert [tool["function"]["name"] for tool in start.tools] == ["add", "wait", "sleep", "lookup", "misbehave"]
        late = ask(host, Step(0, ModelResponse(hermes("sleep", seconds=60) + hermes("add", a=1, b=2)))).observation
        assert late is not None and late.info["counts"] == {"tool_call": 2, "tool_timeout": 1}
        assert contents(late)[1] == "3"
        answer = ask(host, Step(0, ModelResponse("3", turn=1))).observation
        assert answer is not None and answer.reward == 0.8
        ask(host, Close(0))
        ask(host, Reset(1, ROW))
        assert ask(host, Step(1, ModelResponse(hermes("misbehave", kind="print")))).failure == "output"
        ask(host, Reset(2, ROW))
        assert ask(host, Step(2, ModelResponse(hermes("misbehave", kind="exit")))).failure == "lost"
