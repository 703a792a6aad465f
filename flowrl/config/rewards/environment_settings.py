"""Settings of the role environment, which responds to the policy in episodes of one or several turns."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt

from flowrl.config.base import Dependency, ImportName
from flowrl.config.roles import RoleConfig

FAILURE_RATE = Dependency(
    ("max_failure_rate",),
    lambda group: group.on_failure != "stop",
    "on_failure is stop, which ends the run at the first failure: set on_failure, or remove it",
    is_error=False,
)
"""Dependency of the limit of failures, which has no effect if the first failure ends the run."""


class EnvironmentConfig(RoleConfig):
    """An environment. After each response of the policy, it returns the next messages, a reward, or the end of the
    episode.
    """

    name: ImportName
    """Class `module:Class` or `path/file.py:Class` with the protocol `flowrl.environments.base.Environment`, such as
    `flowrl.environments.tool_environment:ToolEnvironment`.
    """

    options: Mapping[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    workers: PositiveInt = 1
    """Number of processes that run environments, over all ranks of the role. One process runs thousands of episodes."""

    timeout_s: PositiveFloat = 60.0
    """Timeout of one call of an environment in seconds."""

    on_timeout: Literal["observe", "fail"] = "observe"
    """Treatment of a step that exceeds `timeout_s`. `observe`: the policy receives a message about the timeout, and the
    episode continues. `fail`: the episode fails.
    """

    max_timeouts: NonNegativeInt = 3
    """Maximum number of observed timeouts of an episode. The next timeout is a failure."""

    restarts: NonNegativeInt = 3
    """Maximum number of restarts of an episode after its process was lost. A restarted episode has new responses."""

    memory_mb: PositiveFloat | None = None
    """Largest memory of a process, in MB (10^6 bytes). Null sets no limit."""

    network: bool = False
    """Whether environments can use the network."""

    on_failure: Literal["stop", "zero", "drop"] = "stop"
    """Treatment of an episode that failed, as in `reward.on_failure`."""

    max_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of failed episodes in a step or evaluation set, as in `reward.max_failure_rate`."""

    DEPENDENCIES = (FAILURE_RATE,)
