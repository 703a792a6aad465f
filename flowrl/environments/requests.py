"""Requests to an `EnvironmentHost`, its replies, and its settings."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.environments.base import ChatMessage, ModelResponse, Observation, Row

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
class EnvironmentLimits:
    """Limits of the processes of a host and of its episodes."""

    workers: int = 1
    """Number of processes."""

    timeout_s: float | None = 60.0
    """Time of `reset`, `step` and `close`. None: no limit."""

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

    memory_mb: float | None = None
    """Address space of each process in MB (10^6 bytes). Each thread needs 8 MiB."""

    allow_network: bool = False
    load_timeout_s: float | None = 120.0
    """Time to import the class."""

    environment: tuple[str, ...] = ()
    """Names of further environment variables that the processes receive."""


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


def as_ids(values: Sequence[Any]) -> bool:  # Any: values of JSON
    """Returns whether a sequence consists of token ids."""
    return bool(values) and all(type(value) is int and value >= 0 for value in values)
