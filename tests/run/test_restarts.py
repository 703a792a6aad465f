"""Conditions for a restart after a process failure."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl import Cluster, FlowError, Placement, WorkerGroup
from flowrl.config import CheckpointConfig, RunConfig
from flowrl.controller.errors import DeadlineError, ProcessLost, WorkerCheckError, WorkerError, WorkerUserError
from flowrl.run.interrupt import Interruption
from flowrl.run.restarts import current_policy, with_restarts
from tests.conftest import BackendName, make_backend
from tests.controller.replica_workers import Replica, StatefulReplica
from tests.errors import missing_facts

PLACEMENT = Placement(device="cpu", pools={"train": [1], "rest": [1]}, roles={"actor": "train", "rollout": "rest"})


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

    def __init__(self, body: Callable[["Program", WorkerGroup], object], backend: BackendName = "ray") -> None:
        self.body = body
        self.backend: BackendName = backend
        self.messages: list[str] = []
        self.failures: list[str] = []
        self.resumes: list[str] = []
        self.restarts: list[int] = []
        self.replica_processes: list[int] = []
        self.clusters: list[Cluster] = []

    def __call__(self, config: RunConfig) -> None:
        policy, interruption = current_policy(), Interruption(self.messages.append)
        self.messages.append(policy.pop_message())
        self.resumes.append(config.resume)
        self.restarts.append(policy.num_restarts)
        with policy.cluster(config, self._cluster, interruption) as cluster:
            self.clusters.append(cluster)
            cluster.notify = self.failures.append
            actor, rollout = cluster.group("actor", StatefulReplica), cluster.group("rollout", Replica)
            self.replica_processes.append(rollout.identify()[0][2])
            self.interruption = interruption
            self.body(self, actor)

    def _cluster(self) -> Cluster:
        return Cluster(PLACEMENT, backend=make_backend(self.backend), num_threads=1)


def is_closed(cluster: Cluster) -> bool:
    try:
        cluster.calls.raise_if_closed()
    except FlowError:
        return True
    return False


def hang(program: Program, actor: WorkerGroup) -> None:
    actor.commit("spin").get()  # past the method's own deadline


def kill_actor(program: Program, actor: WorkerGroup) -> None:
    actor.commit("kill").get()


def test_a_restart_retains_the_other_processes(config: RunConfig):
    program = Program(lambda self, actor: actor.commit("kill" if len(self.replica_processes) < 3 else "nothing").get())
    with_restarts(program, config)
    assert program.resumes == ["never", "auto", "auto"]
    assert program.restarts == [0, 1, 2]
    assert len(set(program.replica_processes)) == 1 and len(set(map(id, program.clusters))) == 1
    assert program.messages[0] == ""
    assert not missing_facts(program.messages[2], "restart", "step", 2, "rollout")
    assert len(program.failures) == 2 and not missing_facts(program.failures[0], "actor.commit", "rank", "node")
    assert is_closed(program.clusters[0])


def test_an_invalid_call_does_not_restart(tmp_path: Path):
    program = Program(lambda self, actor: actor.commit("raise").get(), backend="inline")
    with pytest.raises(WorkerError, match="KeyError"):
        with_restarts(program, RunConfig(output=tmp_path, steps=5, placement=PLACEMENT, restarts=2))
    assert program.restarts == [0]


@pytest.mark.slow
def test_no_restart_after_the_maximal_number(config: RunConfig):
    program = Program(kill_actor)
    with pytest.raises(ProcessLost) as lost:
        with_restarts(program, config)
    assert len(program.replica_processes) == 3 and is_closed(program.clusters[0])
    assert "checkpoint.every" not in str(lost.value)


def without_checkpoint(config: RunConfig, every: int = 5) -> RunConfig:
    changes = {"output": config.output / "another", "checkpoint": CheckpointConfig(every=every)}
    return config.model_copy(update=changes)


@pytest.mark.slow
def test_a_process_lost_before_the_first_checkpoint_restarts_from_step_0_with_new_processes(config: RunConfig):
    program = Program(lambda self, actor: actor.commit("kill" if len(self.replica_processes) < 2 else "nothing").get())
    with_restarts(program, without_checkpoint(config))
    assert program.restarts == [0, 1] and len(set(program.replica_processes)) == 2
    assert not missing_facts(program.messages[1], "restart", "step", 0)


@pytest.mark.slow
def test_the_last_error_without_checkpoints_names_the_setting(config: RunConfig):
    with pytest.raises(ProcessLost) as lost:
        with_restarts(Program(kill_actor), without_checkpoint(config, every=0))
    assert "checkpoint.every=N" in str(lost.value).partition("\n")[0]


@pytest.mark.slow
def test_no_restart_after_an_exception_before_the_first_checkpoint(config: RunConfig):
    program = Program(lambda self, actor: actor.commit("raise").get())
    with pytest.raises(WorkerError, match="KeyError"):
        with_restarts(program, without_checkpoint(config))
    assert len(program.replica_processes) == 1


@pytest.mark.slow
def test_a_hang_that_repeats_from_the_same_checkpoint_ends_the_program(config: RunConfig):
    program = Program(hang)
    with pytest.raises(DeadlineError):
        with_restarts(program, config)
    assert len(program.replica_processes) == 2


@pytest.mark.slow
def test_no_restart_if_an_error_repeats_from_the_same_checkpoint(config: RunConfig):
    program = Program(lambda self, actor: actor.commit("raise").get())
    with pytest.raises(WorkerError, match="KeyError"):
        with_restarts(program, config)
    assert len(program.replica_processes) == 2


@pytest.mark.slow
def test_restart_if_an_error_repeats_after_a_later_checkpoint(config: RunConfig, tmp_path: Path):
    def body(self: Program, actor: WorkerGroup) -> None:
        if len(self.replica_processes) < 3:
            checkpointed(tmp_path, 2 + len(self.replica_processes))
            actor.commit("raise").get()

    program = Program(body)
    with_restarts(program, config)
    assert not missing_facts(program.messages[2], "step", 4, "rollout")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WorkerUserError, WorkerCheckError])
def test_no_restart_after_a_rejection_or_a_failed_check(config: RunConfig, kind: type[WorkerError]):
    def body(self: Program, actor: WorkerGroup) -> None:
        with pytest.raises(ProcessLost):
            kill_actor(self, actor)
        raise kind("actor", 0, 0, "update", "ValueError: the loss is not finite")

    program = Program(body)
    with pytest.raises(kind):
        with_restarts(program, config)
    assert len(program.replica_processes) == 1 and is_closed(program.clusters[0])


def test_no_restart_after_a_signal(config: RunConfig):
    def body(self: Program, actor: WorkerGroup) -> None:
        self.interruption.signal = signal.SIGINT
        kill_actor(self, actor)

    program = Program(body)
    with pytest.raises(ProcessLost):
        with_restarts(program, config)
    assert len(program.replica_processes) == 1 and is_closed(program.clusters[0])


@pytest.mark.slow
def test_no_restart_after_an_error_of_the_driver(config: RunConfig):
    def body(self: Program, actor: WorkerGroup) -> None:
        raise ArithmeticError("a wrong number")

    program = Program(body)
    with pytest.raises(ArithmeticError):
        with_restarts(program, config)
    assert len(program.replica_processes) == 1 and is_closed(program.clusters[0])


@pytest.mark.slow
def test_no_restart_outside_of_with_restarts(config: RunConfig):
    program = Program(kill_actor)
    with pytest.raises(ProcessLost):
        program(config)
    assert len(program.replica_processes) == 1 and is_closed(program.clusters[0])
