"""All kinds of misbehavior: where each happens, the settings of its run, and the expected result.

The module imports nothing of torch, because processes of reward functions import it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Source = Literal["reward", "environment", "tool"]
Form = Literal["sync", "async", "batched"]
OnFailure = Literal["zero", "drop", "stop"]

REWARD_TIMEOUT_S, STEP_TIMEOUT_S, TOOL_TIMEOUT_S = 2.0, 2.0, 1.0
MEMORY_MB = 2000
STEPS = 3
MAX_FAILURE_RATE = 0.5
"""Largest share of failed rows of all kinds except those that exceed it."""


@dataclass(frozen=True)
class Kind:
    """A misbehavior of a reward function, an environment or a tool in a short run."""

    source: Source
    name: str
    """Name of the action of misbehaving_code.py. The form and the treatment follow after `@` if they are not the
    default.
    """
    text: str
    """Description in the table."""
    costs_row: bool = True
    """Whether each row with a call that misbehaves fails."""
    form: Form = "sync"
    """Form of the reward function, the method `step` of the environment, or the tool."""
    on_failure: OnFailure = "zero"
    counted: str | None = None
    """Metric that counts the calls that misbehave, instead of failed rows."""
    exit_code: int = 0
    has_same_numbers: bool = True
    """Whether the run must have the numbers of a run in which these calls return 0 (or, without costs, their score)."""

    @property
    def id(self) -> str:
        return f"{self.source}-{self.name}"


def _observed(name: str, text: str, event: str, *, form: Form = "sync") -> Kind:
    """Returns a misbehavior of a tool that gives an observation. The metric `environment/EVENT` counts it."""
    counted = f"environment/{event}"
    return Kind("tool", name, text, costs_row=False, form=form, counted=counted, has_same_numbers=False)


def _kinds() -> Iterator[Kind]:
    yield from (
        Kind("reward", "exception", "raises an exception"),
        Kind("reward", "none", "returns None"),
        Kind("reward", "nan", "returns NaN"),
        Kind("reward", "infinite", "returns infinity"),
        Kind("reward", "text", "returns text"),
        Kind("reward", "too_large", "returns 1e30"),
        Kind("reward", "short", "returns a list that is too short", form="batched"),
        Kind("reward", "system_exit", "calls `sys.exit`"),
        Kind("reward", "keyboard_interrupt", "raises KeyboardInterrupt"),
        Kind("reward", "exit", "calls `os._exit`"),
        Kind("reward", "exit@async", "calls `os._exit` among 16 concurrent calls", form="async"),
        Kind("reward", "kill", "kills its process (SIGKILL)"),
        Kind("reward", "segfault", "crashes (SIGSEGV)"),
        Kind("reward", "kill_parent", "kills the parent of its process"),
        Kind("reward", "hang", "hangs"),
        Kind("reward", "wait", "awaits without end", form="async"),
        Kind("reward", "not_cancelled", "awaits without end and ignores its cancellation", form="async"),
        Kind("reward", "hang@async", "blocks the event loop", form="async"),
        Kind("reward", "native_hang", "hangs in native code that keeps the interpreter's lock"),
        Kind("reward", "hang_without_signals", "hangs and blocks all signals"),
        Kind("reward", "stop", "stops its process (SIGSTOP)"),
        Kind("reward", "print", "prints without end"),
        Kind("reward", "memory", "allocates memory without end"),
        Kind("reward", "garbage", "writes to the channel of its results"),
        Kind("reward", "close_descriptors", "closes all descriptors"),
        Kind("reward", "network", "connects to a server of the machine"),
        Kind("reward", "secrets", "reads the environment of all processes", costs_row=False),
        Kind("reward", "daemon", "starts a daemon that ignores SIGTERM", costs_row=False),
        Kind("reward", "program", "starts a program that does not end", costs_row=False),
        Kind("reward", "thread", "starts a thread that does not end", costs_row=False),
        Kind("reward", "change_process", "changes folder, signals, timers and limits of its process", costs_row=False),
        Kind("reward", "files", "leaves temporary files", costs_row=False),
        Kind("reward", "hang@drop", "hangs", on_failure="drop", has_same_numbers=False),
        Kind("reward", "kill@stop", "kills its process (SIGKILL)", on_failure="stop", exit_code=2),
        Kind("reward", "hang@stop", "hangs", on_failure="stop", exit_code=2),
        Kind("reward", "exception@always", "raises an exception in every call", exit_code=2, has_same_numbers=False),
    )
    yield from (
        Kind("environment", "exception", "raises an exception in `step`"),
        Kind("environment", "exception@reset", "raises an exception in `reset`", has_same_numbers=False),
        Kind("environment", "none", "returns None from `step`"),
        Kind("environment", "nan_reward", "returns a NaN reward"),
        Kind("environment", "no_role", "returns a message without a role"),
        Kind("environment", "exit", "calls `os._exit`"),
        Kind("environment", "kill", "kills its process (SIGKILL)"),
        Kind("environment", "hang", "hangs in a thread", has_same_numbers=False),
        Kind(
            "environment",
            "wait",
            "awaits without end",
            costs_row=False,
            form="async",
            counted="environment/timeout",
            has_same_numbers=False,
        ),
        Kind("environment", "hang@async", "blocks the event loop", form="async"),
        Kind("environment", "stop", "stops its process (SIGSTOP)"),
        Kind("environment", "print", "prints without end"),
        Kind("environment", "memory", "allocates memory without end"),
        Kind("environment", "garbage", "writes to the channel of its process"),
        Kind("environment", "daemon", "starts a daemon that ignores SIGTERM", costs_row=False),
        Kind("environment", "hang@close", "hangs in `close`", costs_row=False),
        Kind("environment", "kill@stop", "kills its process (SIGKILL)", on_failure="stop", exit_code=2),
    )
    yield from (
        _observed("exception", "raises an exception", "tool_error"),
        _observed("system_exit", "calls `sys.exit`", "tool_error"),
        _observed("hang", "hangs in a thread", "tool_timeout"),
        _observed("wait", "awaits without end", "tool_timeout", form="async"),
        _observed("long_result", "returns 10 MB of text", "result_truncated"),
        _observed("network", "connects to a server of the machine", "tool_error"),
        Kind("tool", "daemon", "starts a daemon that ignores SIGTERM", has_same_numbers=True, costs_row=False),
        Kind("tool", "exit", "calls `os._exit`", has_same_numbers=False),
        Kind("tool", "kill", "kills its process (SIGKILL)", has_same_numbers=False),
        Kind("tool", "print", "prints without end", has_same_numbers=False),
        Kind("tool", "hang@async", "blocks the event loop", form="async", has_same_numbers=False),
    )


KINDS = {kind.id: kind for kind in _kinds()}

ZERO = "zero"
"""Kind of the undisturbed runs in which the calls for the chosen rows return 0."""

HARMLESS = frozenset({"secrets", "daemon", "program", "thread", "change_process", "files", "hang@close"})
"""Kinds after which a call returns its usual result."""
