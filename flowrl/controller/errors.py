"""What goes wrong between the driver and its workers.

FlowError
+-- WorkerError     a worker's method raised
|   +-- RefusedError    what it raised is the user's to mend (a UserError too)
|   +-- FailedCheck     it found that what it computes would be wrong
|   +-- ProcessLost     its process has ended
|   +-- DeadlineError   it did not return in time
+-- BackendError    processes cannot be started or joined as asked (a UserError too)
+-- ContractError   a call or a result breaks what `register` declares (a UserError too)
"""

from flowrl.config.errors import UserError


class FlowError(Exception):
    """The root of the controller's errors."""


class ContractError(FlowError, UserError):
    """A call, or a method's result, does not hold to the method's declared columns or rows."""


class BackendError(FlowError, UserError):
    """Ray cannot be started or joined as the environment or the config asks."""


class WorkerError(FlowError, RuntimeError):
    """A worker failed. Names role, rank, node and method, and carries the traceback of the worker's process.

    `symptom` marks a lost connection to another rank: what that rank did is the cause.
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
    def head(self) -> str:
        """Who failed and why, in a sentence."""
        what = f"{self.role}.{self.method}" if self.method else self.role
        return f"{what} failed on rank {self.rank} (node {self.node}): {self.cause}"

    def __str__(self) -> str:
        told = f"\n\nIn the worker:\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""
        return self.head + told


class ProcessLost(WorkerError):
    """A worker's process has ended: killed, out of memory, or crashed."""

    comes_back = False
    """Whether another process may take its place."""


class DeadlineError(WorkerError):
    """A call ran longer than it may. `remote_traceback` is where its process stood."""


class RefusedError(WorkerError, UserError):
    """A worker refused what a user set or gave. One sentence, without the traceback that is of no use to its reader."""

    def __str__(self) -> str:
        return _sentence(self)


class FailedCheck(WorkerError):
    """A check of a worker's own failed: `CheckFailed`. One sentence, as it names the cause better than a traceback."""

    def __str__(self) -> str:
        return _sentence(self)


def _sentence(error: WorkerError) -> str:
    return f"{error.role}: {error.cause.partition(': ')[2]}"


def unpicklable(error: BaseException) -> str:
    """The cause of a `WorkerError` for a result that cannot leave its process."""
    return f"its result cannot be pickled ({type(error).__name__}: {error}); return plain values, arrays or a table"
