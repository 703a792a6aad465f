"""A program whose processes fail goes on after its newest checkpoint, and the processes that are sound stay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import RunConfig
from flowrl.controller.errors import FailedCheck, ProcessLost, RefusedError, WorkerError
from flowrl.run.interrupt import Interruption

if TYPE_CHECKING:
    from flowrl.controller.cluster import Cluster

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


class RestartPolicy:
    """What one attempt at a program leaves to the next: its cluster, and what is to be said of it."""

    def __init__(self, restarts: int) -> None:
        self._allowed, self._made = restarts, 0
        self._parked: Cluster | None = None
        self._line = ""
        self._last: tuple[str, int] | None = None

    @contextmanager
    def cluster(
        self, config: RunConfig, start: "Callable[[], Cluster]", interruption: Interruption
    ) -> "Iterator[Cluster]":
        """The cluster of an attempt: the one before's where that failed, or another. It is closed at the end, or kept
        where there is to be another attempt."""
        cluster, self._parked = self._parked or start(), None
        try:
            yield cluster
        except WorkerError as error:
            if self._goes_on(error, config, cluster):
                self.retain_cluster(error, config, cluster)
            if interruption.signal is not None:
                self._parked = None
            elif isinstance(error, ProcessLost) and _saves_nothing(config):
                error.cause += "; no checkpoint was saved to go on from: checkpoint.every=N saves one every N steps"
            raise
        finally:
            if self._parked is None:
                cluster.close()

    def _goes_on(self, error: WorkerError, config: RunConfig, cluster: "Cluster") -> bool:
        """Whether another attempt may come further: processes have failed, and not what they were given to do."""
        refused = isinstance(error, RefusedError | FailedCheck) or cluster.calls.failures.first() is None
        if refused or self._made >= self._allowed or not Checkpoints(config.output).steps():
            return False
        return not self._is_defect(error, config) and not cluster.has_lost_nodes()

    def _is_defect(self, error: WorkerError, config: RunConfig) -> bool:
        """Whether a method raises what it has raised in the attempt before, which began where this one has."""
        return not isinstance(error, ProcessLost) and self._last == (error.head, _newest(config))

    def retain_cluster(self, error: WorkerError, config: RunConfig, cluster: "Cluster") -> None:
        self._made += 1
        self._last = error.head, _newest(config)
        kept = cluster.restart()
        stay = f"the processes of {', '.join(kept)} stay" if kept else "no role keeps its processes"
        self._line = f"{error}\nrestart {self._made} of {self._allowed}: going on after step {_newest(config)}; {stay}"
        self._parked = cluster

    @property
    def made(self) -> int:
        """How often the program was begun again."""
        return self._made

    @property
    def is_resuming(self) -> bool:
        """Whether the attempt that has failed is to be followed by another."""
        return self._parked is not None

    def said(self) -> str:
        """What the next attempt tells of the one before; empty for the first."""
        line, self._line = self._line, ""
        return line

    def close(self) -> None:
        """Ends the cluster that no attempt has taken."""
        if self._parked is not None:
            self._parked.close()


_current: ContextVar[RestartPolicy | None] = ContextVar("attempts", default=None)


def attempt() -> RestartPolicy:
    """The attempts that the present one belongs to; one alone, for a program that `with_restarts` has not called."""
    return _current.get() or RestartPolicy(0)


def with_restarts(train: Callable[[AnyConfig], object], config: AnyConfig) -> None:
    """Calls `train(config)`, and with `resume: auto` again when processes fail and there is a checkpoint to go on from.

    At most `config.restarts` times. Processes that are replaced when they are lost (makers, references, rewards) stay
    through that, unless they are what failed; those that hold training state start anew, and load the checkpoint as in
    any resume. Wrong input, failed checks, and what a method raises twice from the same checkpoint on end the program.

    Raises: what `train` raises, of the attempt that was the last.
    """
    attempts = RestartPolicy(config.restarts)
    token = _current.set(attempts)
    try:
        while True:
            try:
                train(config)
                return
            except WorkerError:
                if not attempts.is_resuming:
                    raise
                config = config.model_copy(update={"resume": "auto"})
    finally:
        _current.reset(token)
        attempts.close()


def _saves_nothing(config: RunConfig) -> bool:
    """Whether there is no checkpoint, and will be none."""
    return not config.checkpoint.every and not Checkpoints(config.output).steps()


def _newest(config: RunConfig) -> int:
    """The step of the newest checkpoint."""
    return Checkpoints(config.output).steps()[-1]
