"""Restarts a program from its newest checkpoint after a process failure. Keeps intact processes of stateless roles."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.run_folder import is_disk_full
from flowrl.config import RunConfig, UserError
from flowrl.controller.errors import DeadlineError, ProcessLost, WorkerCheckError, WorkerError, WorkerUserError
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.run.interrupt import Interruption

if TYPE_CHECKING:
    from flowrl.controller.cluster import Cluster

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


class RestartPolicy:
    """Decides after each failure whether the program restarts, and keeps the cluster for the next attempt."""

    def __init__(self, max_restarts: int, checked: CheckedRun | None = None) -> None:
        self._max_restarts = max_restarts
        self._checked = checked
        self.num_restarts = 0
        """Number of restarts so far."""
        self.is_restarting = False
        """Whether another attempt follows the failed attempt."""
        self._retained: Cluster | None = None
        self._message = ""
        self._last_failure: tuple[str, int] | None = None

    @contextmanager
    def cluster(
        self, config: RunConfig, start: "Callable[[], Cluster]", interruption: Interruption
    ) -> "Iterator[Cluster]":
        """Yields the cluster that the previous attempt has kept, or a new one. Closes it at the end unless the next
        attempt uses it. Errors of a full disk or a deleted output folder become a UserError.
        """
        self.is_restarting = False
        cluster, self._retained = self._retained or start(), None
        try:
            with _explaining_folder_errors(config.output):
                yield cluster
        except WorkerError as error:
            if self._can_restart(error, config, cluster):
                self._prepare_restart(error, config, cluster)
            if interruption.signal is not None:
                self._retained, self.is_restarting = None, False
            elif isinstance(error, ProcessLost) and not config.checkpoint.every and not _has_checkpoint(config):
                error.cause += "; there is no checkpoint to resume from: set checkpoint.every=N to save every N steps"
            raise
        finally:
            if self._retained is None:
                cluster.close()

    def _can_restart(self, error: WorkerError, config: RunConfig, cluster: "Cluster") -> bool:
        """Whether to restart after an error. Requires a failed process as the cause (not a bug or invalid input), a
        remaining restart, and all nodes of a joined cluster.
        """
        is_rejected = (
            isinstance(error, WorkerUserError | WorkerCheckError) or cluster.calls.failures.get_first_error() is None
        )
        # A local Ray starts again with all devices. In a joined cluster, the devices of a lost node are missing.
        lacks_devices = config.address is not None and cluster.has_lost_nodes()
        if is_rejected or self.num_restarts >= self._max_restarts or lacks_devices:
            return False
        if isinstance(error, ProcessLost):
            return True
        # The same error from the same checkpoint is a bug. Without a checkpoint, any exception may be a bug.
        is_repeated = self._last_failure == (_failure_key(error), _newest_step(config))
        return not is_repeated and (isinstance(error, DeadlineError) or _has_checkpoint(config))

    def _prepare_restart(self, error: WorkerError, config: RunConfig, cluster: "Cluster") -> None:
        self.num_restarts += 1
        self._last_failure = _failure_key(error), _newest_step(config)
        cluster.notify(str(error))  # before the restart, which may wait for calls in flight
        has_ray = not cluster.has_lost_nodes()
        # The first step needs the initial weights, which retained rollout processes may have replaced.
        roles = cluster.restart(can_retain=_has_checkpoint(config)) if has_ray else ()
        retained = f"retaining the processes of {', '.join(roles)}" if roles else "all processes restart"
        start = "resuming from" if _has_checkpoint(config) else "no checkpoint: restarting from"
        self._message = (
            f"restart {self.num_restarts} of {self._max_restarts}: {start} step {_newest_step(config)}; {retained}"
        )
        self._retained, self.is_restarting = cluster if has_ray else None, True

    def pop_checked(self, config: RunConfig) -> CheckedRun:
        """Returns the config with its placement plan. The first attempt uses the plan of the checks before the run.

        Later attempts compute the plan again, because a device may be lost.
        """
        checked, self._checked = self._checked, None
        return CheckedRun(config) if checked is None else checked.replace(config)

    def pop_message(self) -> str:
        """Returns the message about the last restart and clears it. Returns an empty string if there is none."""
        message, self._message = self._message, ""
        return message

    def close(self) -> None:
        """Closes a kept cluster that no attempt has used."""
        if self._retained is not None:
            self._retained.close()


_current: ContextVar[RestartPolicy | None] = ContextVar("restart_policy", default=None)


def current_policy() -> RestartPolicy:
    """Returns the policy of the enclosing `with_restarts`, or a policy without restarts."""
    return _current.get() or RestartPolicy(0)


def with_restarts(train: Callable[[AnyConfig], object], config: AnyConfig, checked: CheckedRun | None = None) -> None:
    """Calls `train(config)`, and again with `resume: auto` after process failures, up to `config.restarts` times.

    A restart resumes from the newest checkpoint. Without a checkpoint, it starts again from step 0, but only after a
    lost process or a missed deadline. With a checkpoint, processes of stateless roles (rollout, reference, reward) are
    kept unless they failed. Processes with training state restart and load the checkpoint. There is no restart after
    invalid input, failed checks, or an error that a method raises twice from the same checkpoint. The exception of the
    last attempt is raised. The first attempt uses the plan of `checked` (from `check_start`).
    """
    policy = RestartPolicy(config.restarts, checked)
    token = _current.set(policy)
    try:
        while True:
            try:
                train(config)
                return
            except WorkerError:
                if not policy.is_restarting:
                    raise
                config = config.model_copy(update={"resume": "auto"})
    finally:
        _current.reset(token)
        policy.close()


@contextmanager
def _explaining_folder_errors(folder: Path) -> Iterator[None]:
    """Raises UserError in place of an error about a file in `folder` if the disk is full or `folder` was deleted."""
    has_existed = folder.is_dir()
    try:
        yield
    except (OSError, WorkerError) as error:
        cause = error.cause if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        if str(folder) not in cause:
            raise
        if isinstance(error, OSError) and is_disk_full(error):
            steps = Checkpoints(folder).steps()
            resume = f"; resume=auto resumes from step {max(steps)}" if steps else ""
            raise UserError(
                f"cannot write to output folder {folder} ({error.strerror}): free disk space, or set output to another "
                f"disk{resume}"
            ) from error
        if not cause.startswith(FileNotFoundError.__name__) or not has_existed or folder.exists():
            raise
        raise UserError(
            f"output folder {folder} has disappeared during the run: start the run again, and keep the folder until "
            f"it ends"
        ) from error


def _has_checkpoint(config: RunConfig) -> bool:
    return bool(Checkpoints(config.output).steps())


def _newest_step(config: RunConfig) -> int:
    return max(Checkpoints(config.output).steps(), default=0)


def _failure_key(error: WorkerError) -> str:
    """Returns a text that is equal if a failure repeats. The text of a hang omits the stacks, which may differ."""
    return f"{error.role}.{error.method} hangs" if isinstance(error, DeadlineError) else error.summary
