"""Errors of the controller.

FlowError
+-- WorkerError         a call to a worker failed
|   +-- WorkerUserError     the user must fix the cause (also a UserError)
|   +-- WorkerCheckError    a self-check of the worker failed
|   +-- ProcessLost         the process of the worker has ended
|   +-- DeadlineError       the call passed its deadline
+-- BackendError        Ray cannot be started or joined (also a UserError)
+-- ContractError       a call or a result violates the `register` declaration (also a UserError)
"""

from flowrl.config.user_errors import UserError
from flowrl.data.console import indent_lines, shorten


class FlowError(Exception):
    """Base class of the controller's errors."""


class ContractError(FlowError, UserError):
    """The arguments or the result of a call violate the `register` declaration of the method."""


class BackendError(FlowError, UserError):
    """Ray cannot be started or joined."""


_MAX_CAUSE, _MAX_TRACEBACK = 4_000, 12_000
"""Maximum number of characters of an error message and of a traceback."""


class WorkerError(FlowError, RuntimeError):
    """A call to a worker failed.

    Args:
        cause: error message without the name of the call.
        remote_traceback: traceback in the worker's process; empty if there is none.
        symptom: whether the error is a lost connection between ranks. The failure of another rank is then the cause.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        node: int,
        method: str,
        cause: str,
        remote_traceback: str = "",
        symptom: bool = False,
    ) -> None:
        cause = shorten(indent_lines(cause), _MAX_CAUSE)
        remote_traceback = shorten(remote_traceback, _MAX_TRACEBACK)
        super().__init__(role, rank, node, method, cause, remote_traceback, symptom)
        self.role, self.rank, self.node, self.method = role, rank, node, method
        self.cause = cause
        self.remote_traceback = remote_traceback
        self.symptom = symptom

    @property
    def summary(self) -> str:
        name = f"{self.role}.{self.method}" if self.method else self.role
        return f"{name} failed on rank {self.rank} (node {self.node}): {self.cause}"

    def __str__(self) -> str:
        traceback = f"\n\nIn the worker:\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""
        return self.summary + traceback


class ProcessLost(WorkerError):
    """The process of a worker was killed, ran out of memory, or crashed."""

    is_replaceable = False
    """Whether the backend starts a replacement process."""

    is_sender_known = False
    """Whether `cause` names the program that ended the process. An exit code or a signal would not add information."""


class DeadlineError(WorkerError):
    """A call passed its deadline. `remote_traceback` is the stack of the process at the deadline."""

    advice = ""
    """Fix that the message suggests, such as a setting to raise. Empty adds no text."""

    @property
    def summary(self) -> str:
        return "; ".join(filter(None, (super().summary, self.advice)))


class WorkerUserError(WorkerError, UserError):
    """A worker raised a UserError. The message has no traceback."""

    def __str__(self) -> str:
        return _format_cause(self)


class WorkerCheckError(WorkerError):
    """A worker raised CheckFailed. The message has no traceback."""

    def __str__(self) -> str:
        return _format_cause(self)


def _format_cause(error: WorkerError) -> str:
    return f"{error.role}: {error.cause.partition(': ')[2]}"


def describe_unpicklable(error: BaseException) -> str:
    """Returns the `cause` text of the WorkerError for a result that cannot be pickled."""
    return f"its result cannot be pickled ({type(error).__name__}: {error}); return plain values, arrays or a table"
