"""Functions and limits of a pool, and the outcome of a row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.rewards.reward_function import Failure, FunctionKind


@dataclass(frozen=True)
class FunctionSpec:
    """A function of a pool."""

    name: str
    """Name with which rows are submitted. Messages show `function` instead."""

    function: str
    """`module:function` or `path/to/file.py:function`."""

    options: Mapping[str, Any] = field(default_factory=dict)  # Any: values of JSON
    """Further keyword arguments of each call."""

    batch_size: int | None = None
    """Maximum number of rows of a call. The function then receives lists and returns a list. None: one row per call."""

    kind: FunctionKind = "reward function"
    """An answer function receives the column `response` only, and returns a text or None."""

    @property
    def title(self) -> str:
        """Kind and import name, for messages."""
        return f"{self.kind} {self.function}"


@dataclass(frozen=True)
class PoolLimits:
    """Limits of the processes of a pool."""

    workers: int
    """Number of processes."""

    timeout_s: float | None
    """Time of a call. None: no limit."""

    retries: int = 0
    """Number of further attempts for a row whose call failed, each in another process."""

    memory_mb: float | None = None
    """Address space of each process in MB (10^6 bytes)."""

    allow_network: bool = False
    max_concurrent: int = 64
    """Number of concurrent calls of async functions per process."""

    load_timeout_s: float | None = 120.0
    """Time to import a function."""

    environment: tuple[str, ...] = ()
    """Names of further environment variables that the functions receive."""


@dataclass(frozen=True)
class Outcome:
    """The result of a row, or the reason why it has none."""

    score: float | None
    failure: Failure | None = None
    message: str = ""
    seconds: float = 0.0
    """Time of the last call. A batched call counts fully for each of its rows."""

    num_attempts: int = 1
    """Number of calls for this row. Calls that failed because of another row are not counted."""

    answer: str | None = None
    """Result of an answer function, which gives no score."""
