"""When a program restarts after a process failure, and when it ends."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl import Cluster, FlowError, Placement, WorkerGroup
from flowrl.config import CheckpointConfig, RunConfig
from flowrl.controller.errors import ProcessLost, WorkerCheckError, WorkerError, WorkerUserError
from flowrl.run.interrupt import Interruption
from flowrl.run.restarts import current_policy, with_restarts
from tests.controller.replica_workers import Replica, StatefulReplica

PLACEMENT = Placement(device="cpu", pools={"train": [1], "rest": [1]}, roles={"actor": "train", "maker": "rest"})


@pytest.fixture
def config(ray_session: None, tmp_path: Path) -> RunConfig:
    checkpointed(tmp_path, 2)
    return RunConfig(output=tmp_path, steps=5, placement=PLACEMENT, restarts=2)


def checkpointed(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").touch()


class Program:
    """A training function with a given body. Records messages and processes of every attempt."""

    def __init__(self, body: Callable[["Program", WorkerGroup], object]) -> None:
        self.body = body
        self.messages: list[str] = []
        self.resumes: list[str] = []
        self.restarts: list[int] = []
        self.makers: list[int] = []
        self.clusters: list[Cluster] = []

    def __call__(self, config: RunConfig) -> None:
        policy, interruption = current_policy(), Interruption(self.messages.append)
        self.messages.append(policy.pop_message())
        self.resumes.append(config.resume)
        self.restarts.append(policy.num_restarts)
        with policy.cluster(config, self._cluster, interruption) as cluster:
            self.clusters.append(cluster)
            actor, maker = cluster.group("actor", StatefulReplica), cluster.group("maker", Replica)
            self.makers.append(maker.identify()[0][2])
            self.interruption = interruption
            self.body(self, actor)

    def _cluster(self) -> Cluster:
        return Cluster(PLACEMENT, num_threads=1)


def is_closed(cluster: Cluster) -> bool:
    try:
        cluster.calls.raise_if_closed()
    except FlowError:
        return True
    return False


def lose(program: Program, actor: WorkerGroup) -> None:
    actor.commit("kill").get()


def test_a_restart_retains_the_other_processes(config: RunConfig):
    program = Program(lambda self, actor: actor.commit("kill" if len(self.makers) < 3 else "nothing").get())
    with_restarts(program, config)
    assert program.resumes == ["never", "auto", "auto"]
    assert program.restarts == [0, 1, 2]
    assert len(set(program.makers)) == 1 and len(set(map(id, program.clusters))) == 1
    assert program.messages[0] == ""
    assert program.messages[2].startswith("actor.commit failed on rank 0 (node 0)")
    assert program.messages[2].endswith("restart 2 of 2: resuming from step 2; retaining the processes of maker")
    assert is_closed(program.clusters[0])


@pytest.mark.slow
def test_no_restart_after_the_maximal_number(config: RunConfig):
    program = Program(lose)
    with pytest.raises(ProcessLost) as lost:
        with_restarts(program, config)
    assert len(program.makers) == 3 and is_closed(program.clusters[0])
    assert "checkpoint.every" not in str(lost.value)


@pytest.mark.parametrize("every", [0, 5])
def test_no_restart_without_a_checkpoint(config: RunConfig, tmp_path: Path, every: int):
    program = Program(lose)
    changes = {"output": tmp_path / "another", "checkpoint": CheckpointConfig(every=every)}
    with pytest.raises(ProcessLost) as lost:
        with_restarts(program, config.model_copy(update=changes))
    assert len(program.makers) == 1 and is_closed(program.clusters[0])
    assert ("checkpoint.every=N" in str(lost.value).partition("\n")[0]) == (every == 0)


def test_no_restart_if_an_error_repeats_from_the_same_checkpoint(config: RunConfig):
    program = Program(lambda self, actor: actor.commit("raise").get())
    with pytest.raises(WorkerError, match="nothing there"):
        with_restarts(program, config)
    assert len(program.makers) == 2


def test_restart_if_an_error_repeats_after_a_later_checkpoint(config: RunConfig, tmp_path: Path):
    def body(self: Program, actor: WorkerGroup) -> None:
        if len(self.makers) < 3:
            checkpointed(tmp_path, 2 + len(self.makers))
            actor.commit("raise").get()

    program = Program(body)
    with_restarts(program, config)
    assert program.messages[2].endswith("resuming from step 4; retaining the processes of maker")


@pytest.mark.parametrize("kind", [WorkerUserError, WorkerCheckError])
def test_no_restart_after_a_rejection_or_a_failed_check(config: RunConfig, kind: type[WorkerError]):
    def body(self: Program, actor: WorkerGroup) -> None:
        with pytest.raises(ProcessLost):
            lose(self, actor)
        raise kind("actor", 0, 0, "update", "ValueError: the loss is not finite")

    program = Program(body)
    with pytest.raises(kind):
        with_restarts(program, config)
    assert len(program.makers) == 1 and is_closed(program.clusters[0])


def test_no_restart_after_a_signal(config: RunConfig):
    def body(self: Program, actor: WorkerGroup) -> None:
        self.interruption.signal = signal.SIGINT
        lose(self, actor)

    program = Program(body)
    with pytest.raises(ProcessLost):
        with_restarts(program, config)
    assert len(program.makers) == 1 and is_closed(program.clusters[0])


def test_no_restart_after_an_error_of_the_driver(config: RunConfig):
    def body(self: Program, actor: WorkerGroup) -> None:
        raise ArithmeticError("a wrong number")

    program = Program(body)
    with pytest.raises(ArithmeticError):
        with_restarts(program, config)
    assert len(program.makers) == 1 and is_closed(program.clusters[0])


def test_no_restart_outside_of_with_restarts(config: RunConfig):
    program = Program(lose)
    with pytest.raises(ProcessLost):
        program(config)
    assert len(program.makers) == 1 and is_closed(program.clusters[0])
