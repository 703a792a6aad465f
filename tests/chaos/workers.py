"""Workers that record their process and their current method.

The environment variable `FLOWRL_CHAOS` names the folder with the records: `now/ROLE-RANK` has the process id and the
current method of a worker.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flowrl.controller.worker import Worker, get_registered_methods
from flowrl.workers import Actor, Critic, EnvironmentWorker, Reference, Reward, Rollout

FOLDER = "FLOWRL_CHAOS"
BETWEEN_CALLS = "-"
EVALUATION = "evaluation"
RECORD_BYTES = 96

AnyWorker = TypeVar("AnyWorker", bound=type[Worker])

_running: list[str] = []
"""The traced method that this process runs."""


def traced(cls: AnyWorker) -> AnyWorker:
    """Makes a worker class record its process, and the beginning and end of its constructor and methods."""
    for name, (method, _) in get_registered_methods(cls).items():
        setattr(cls, name, _traced_method(method))
    cls.__init__ = _traced_method(cls.__init__)
    return cls


def _traced_method(method: Callable) -> Callable:
    @functools.wraps(method)
    def run(self: Worker, *args: Any, **kwargs: Any) -> Any:  # Any: those of the method
        if _running:  # for example, `optim_step` in `update`, which remains the current method
            return method(self, *args, **kwargs)
        is_evaluation = kwargs.get("temperature") is not None or kwargs.get("evaluation")
        _running.append(method.__name__)
        _record(self, EVALUATION if is_evaluation else method.__name__)
        try:
            return method(self, *args, **kwargs)
        finally:
            _running.clear()
            _record(self, BETWEEN_CALLS)

    return run


def _record(worker: Worker, method: str) -> None:
    text = f"{os.getpid()} {method} {time.monotonic()}\n".ljust(RECORD_BYTES)
    path = Path(os.environ[FOLDER], "now", f"{worker.context.role}-{worker.rank}")
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(file, text.encode(), 0)  # one write, so that a reader sees a complete record
    os.close(file)


@traced
class TracedActor(Actor):
    pass


@traced
class TracedCritic(Critic):
    pass


@traced
class TracedReference(Reference):
    pass


@traced
class TracedReward(Reward):
    pass


@traced
class TracedEnvironment(EnvironmentWorker):
    pass


@traced
class TracedRollout(Rollout):
    pass
