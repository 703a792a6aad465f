"""Checks values that environments return, and converts them to and from JSON. Used by the host and its processes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.environments.base import Observation
from flowrl.environments.requests import as_ids
from flowrl.rewards.processes.frames import encode_json
from flowrl.rewards.reward_function import MAX_SCORE, show_value

MAX_REPLY_BYTES = 1 << 20
"""Size of the JSON of a reply."""


class InvalidValueError(ValueError):
    """Raised if an environment returns a value that is not allowed."""


def check_messages(messages: Any, owner: str) -> list[dict[str, Any]]:  # Any: a value of the user
    """Returns messages as a list. Raises InvalidValueError if they are not messages."""
    if not isinstance(messages, list | tuple):
        raise InvalidValueError(f"{owner} returned {show_value(messages)}, but must return a list of messages")
    for message in messages:
        is_valid = isinstance(message, Mapping) and isinstance(message.get("role"), str) and message["role"]
        if not is_valid or not isinstance(message.get("content"), str):
            raise InvalidValueError(
                f"{owner} returned the message {show_value(message)}, but a message has the texts role and content"
            )
    return [dict(message) for message in messages]


def check_start(value: Any, tools: Any) -> dict[str, Any]:  # Any: values of the user
    """Returns the JSON of a result of `reset`. Raises InvalidValueError if it is invalid."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    is_tokens = isinstance(value, list | tuple) and as_ids(value)
    body: dict[str, Any] = {"prompt_ids": list(value)} if is_tokens else {}
    if not is_tokens:
        body["messages"] = check_messages(value, "reset")
        if not body["messages"]:
            raise InvalidValueError("reset returned no messages: return at least one message, or tokens")
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidValueError(f"the attribute tools is {show_value(tools)}, but must be a list of JSON schemas")
    if tools:
        body["tools"] = list(tools)
    return body


def check_observation(value: Any) -> dict[str, Any]:  # Any: a value of the user
    """Returns the JSON of an observation. Raises InvalidValueError if it is invalid."""
    if not isinstance(value, Observation):
        raise InvalidValueError(f"step returned {show_value(value)}, but must return an Observation")
    messages = check_messages(value.messages, "step")
    if not isinstance(value.done, bool | int) or value.done not in (0, 1):
        raise InvalidValueError(f"step returned done={show_value(value.done)}, but it must be a bool")
    if not value.done and not messages:
        raise InvalidValueError("step returned no messages, but the episode continues: return messages or done=True")
    if not isinstance(value.info, Mapping):
        raise InvalidValueError(f"step returned info={show_value(value.info)}, but it must be a mapping")
    return {
        "messages": messages,
        "reward": None if value.reward is None else _check_reward(value.reward),
        "done": bool(value.done),
        "info": dict(value.info),
    }


def _check_reward(value: Any) -> float:  # Any: a value of the user, such as a scalar of NumPy
    try:
        reward = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not abs(reward) <= MAX_SCORE:
        raise InvalidValueError(f"step returned the reward {show_value(value)}: return a finite number or None")
    return reward


def encode_body(body: Mapping[str, Any]) -> bytes:  # Any: values of JSON
    """Returns the JSON of a reply. Raises InvalidValueError if it has none or is too large."""
    try:
        encoded = encode_json(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"the result of the environment is not JSON: {error}") from error
    if len(encoded) > MAX_REPLY_BYTES:
        raise InvalidValueError(
            f"the result of the environment has {len(encoded)} bytes, but at most {MAX_REPLY_BYTES} are allowed: "
            "shorten its messages"
        )
    return encoded


def parse_observation(body: Mapping[str, Any]) -> Observation:  # Any: unchecked values of JSON
    """Checks the JSON of a reply and returns it as an Observation. Raises LookupError, TypeError or ValueError if a
    value is missing or has a wrong type.
    """
    reward, done, info = body.get("reward"), body.get("done", False), body.get("info", {})
    if reward is not None:
        reward = _check_reward(reward)
    if not isinstance(done, bool) or not isinstance(info, dict):
        raise TypeError("an invalid observation")
    return Observation(tuple(check_messages(body.get("messages", []), "a process")), reward, done, info)


def parse_ids(body: Mapping[str, Any]) -> tuple[int, ...] | None:  # Any: unchecked values of JSON
    """Returns the tokens of a reply to `reset`, or None. Raises ValueError if they are invalid."""
    ids = body.get("prompt_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not as_ids(ids):
        raise ValueError("invalid tokens")
    return tuple(ids)


def parse_tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:  # Any: unchecked values of JSON
    """Returns the JSON schemas of a reply to `reset`. Raises ValueError if they are invalid."""
    tools: Sequence[Any] = body.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("invalid tools")
    return tuple(tools)
