"""Requests to an `EnvironmentHost`, its replies with their checks, and its settings."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.environments.base import ChatMessage, ModelResponse, Observation, Row
from flowrl.rewards.reward_function import MAX_SCORE, show_value
from flowrl.user_code.process import ProcessLimits
from flowrl.user_code.supervisor import encode_json

Failure = Literal[
    "raised", "invalid", "output", "memory", "timeout", "exited", "killed", "corrupt", "not_loaded", "closed", "lost"
]
"""Kind of a failure, which ends an episode.

- `raised`: an exception. `invalid`: no valid observation, or a row that cannot be sent. `output`: printed too much.
- `memory`: MemoryError. `timeout`: no result in time. `exited`, `killed`: ended its process. `corrupt`: wrote invalid
  data to the channel of its process.
- `not_loaded`: the class cannot be imported. `closed`: the episode or the host was closed.
- `lost`: the process of the episode has ended, perhaps because of another episode. Start the episode again.
"""


@dataclass(frozen=True)
class EnvironmentSpec:
    """The class of the environments of a host."""

    name: str
    """`module:Class` or `path/to/file.py:Class`, or a function that returns an environment."""

    options: Mapping[str, Any] = field(default_factory=dict)  # Any: values of JSON
    """Keyword arguments of the class."""


@dataclass(frozen=True)
class EnvironmentLimits(ProcessLimits):
    """Limits of the processes of a host and of its episodes. `timeout_s` is the time of `reset`, `step` and `close`."""

    on_timeout: Literal["observe", "fail"] = "observe"
    """observe: a `step` without a result in time gives an observation with `timeout_message`, and the episode
    continues. fail: it ends the episode."""

    timeout_message: str = "The environment did not respond within {timeout_s:g} s."
    """Content of the observation after a timeout. Its role is the first of the environment's `observation_roles`, or
    `user` without them.
    """

    max_timeouts: int = 3
    """Number of observed timeouts of an episode. The next one ends it."""

    threads: int = 256
    """Maximum number of threads per process for sync methods and tools."""


@dataclass(frozen=True)
class Reset:
    """Starts an episode. An unfinished episode of this id is discarded."""

    episode: Hashable
    row: Row


@dataclass(frozen=True)
class Step:
    """Continues an episode."""

    episode: Hashable
    response: ModelResponse


@dataclass(frozen=True)
class Close:
    """Ends an episode and cancels its call."""

    episode: Hashable


Request = Reset | Step | Close


@dataclass(frozen=True)
class Reply:
    """The result of a request. `observation` is None after a failure and for `Close`."""

    observation: Observation | None = None
    """Observation that `step` returned. For `reset`, its messages are the start of the conversation."""

    prompt_ids: tuple[int, ...] | None = None
    """Tokens of the prompt, if `reset` has returned tokens."""

    tools: tuple[ChatMessage, ...] = ()
    """JSON schemas of the tools for the chat template. Only for `reset`."""

    failure: Failure | None = None
    message: str = ""
    """Description of the failure."""

    is_blameless: bool = False
    """For `lost`: whether the episode cannot have ended its process. For example, another episode ended it, or this
    episode had no call in flight.
    """

    seconds: float = 0.0
    """Time from the request to the result."""


# Values of environments, which its process and the host check.

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
    is_tokens = isinstance(value, list | tuple) and _is_ids(value)
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


_CHILD_FAILURES = ("raised", "invalid", "output", "memory", "timeout", "lost")
"""Failures that a process reports itself."""


def parse_reply(body: Mapping[str, Any], request: Request, seconds: float) -> Reply:  # Any: unchecked values of JSON
    """Returns the reply of a process. Raises LookupError, TypeError or ValueError if a value is missing or invalid."""
    if (failure := body.get("failure")) is not None:
        if failure not in _CHILD_FAILURES:
            raise ValueError("unknown failure")
        return Reply(failure=failure, message=str(body["message"]), seconds=seconds)
    if isinstance(request, Close):
        return Reply(seconds=seconds)
    reward, done, info = body.get("reward"), body.get("done", False), body.get("info", {})
    ids, tools = body.get("prompt_ids"), body.get("tools", [])
    if not isinstance(done, bool) or not isinstance(info, dict):
        raise TypeError("an invalid observation")
    if ids is not None and not (isinstance(ids, list) and _is_ids(ids)):
        raise ValueError("invalid tokens")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("invalid tools")
    messages = tuple(check_messages(body.get("messages", []), "a process"))
    observation = Observation(messages, None if reward is None else _check_reward(reward), done, info)
    return Reply(observation, None if ids is None else tuple(ids), tuple(tools), seconds=seconds)


def _is_ids(values: Sequence[Any]) -> bool:  # Any: values of JSON
    """Returns whether a sequence consists of token ids."""
    return bool(values) and all(type(value) is int and value >= 0 for value in values)
