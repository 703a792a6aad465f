"""Errors of the controller.

FlowError
+-- WorkerError         a method of a worker raised
|   +-- WorkerUserError     the user must fix its cause (also a UserError)
|   +-- WorkerCheckError    a self-check of the worker failed
|   +-- ProcessLost         the process of the worker has ended
|   +-- DeadlineError       the call passed its deadline
+-- BackendError        processes cannot be started, or the cluster cannot be joined (also a UserError)
+-- ContractError       a call or a result violates the `register` declaration (also a UserError)
"""

from flowrl.config.user_errors import UserError


class FlowError(Exception):
    """Base class of the controller's errors."""


class ContractError(FlowError, UserError):
    """A call or its result violates the declaration of the method: arguments, columns or rows."""


class BackendError(FlowError, UserError):
    """Ray cannot be started or joined with the given environment and config."""


class WorkerError(FlowError, RuntimeError):
    """A worker failed.

    Args:
        cause: one sentence.
        remote_traceback: the traceback in the worker's process.
        symptom: whether the error is a lost connection to another rank, whose failure is the cause.
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
        super().__init__(role, rank, node, method, cause, remote_traceback, symptom)
        self.role, self.rank, self.node, self.method = role, rank, node, method
        self.cause = cause
        self.remote_traceback = remote_traceback
        self.symptom = symptom

    @property
    def summary(self) -> str:
        """The role, method, rank, node and cause in one sentence."""
        name = f"{self.role}.{self.method}" if self.method else self.role
        return f"{name} failed on rank {self.rank} (node {self.node}): {self.cause}"

    def __str__(self) -> str:
        traceback = f"\n\nIn the worker:\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""
        return self.summary + traceback


class ProcessLost(WorkerError):
    """The process of a worker has ended: it was killed, ran out of memory, or crashed."""

    is_replaceable = False
    """Whether the backend starts a replacement process."""


class DeadlineError(WorkerError):
    """A call passed its deadline. `remote_traceback` is the stack of its process at that time."""


class WorkerUserError(WorkerError, UserError):
    """A worker raised a UserError. Its message omits the traceback, which does not help the user."""

    def __str__(self) -> str:
        return _format_cause(self)


class WorkerCheckError(WorkerError):
    """A self-check of a worker raised CheckFailed. Its message omits the traceback."""

    def __str__(self) -> str:
        return _format_cause(self)


def _format_cause(error: WorkerError) -> str:
    """Returns the cause without the name of the exception class."""
    return f"{error.role}: {error.cause.partition(': ')[2]}"


def describe_unpicklable(error: BaseException) -> str:
    """Returns the `cause` of a WorkerError for a result that cannot be pickled."""
    return f"its result cannot be pickled ({type(error).__name__}: {error}); return plain values, arrays or a table"
