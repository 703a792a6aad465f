"""When a program whose processes failed is begun again, and when it ends."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl import Cluster, FlowError, Placement, WorkerGroup
from flowrl.config import RunConfig
from flowrl.config.checkpoint import CheckpointConfig
from flowrl.controller.errors import FailedCheck, ProcessLost, RefusedError, WorkerError
from flowrl.run.interrupt import Interruption
from flowrl.run.restarts import attempt, with_restarts
from tests.controller.makers import Keeper, Maker

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
    """A loop whose body is given; what it was told, and what processes it had."""

    def __init__(self, body: Callable[["Program", WorkerGroup], object]) -> None:
        self.body = body
        self.said: list[str] = []
        self.resumes: list[str] = []
        self.restarts: list[int] = []
        self.makers: list[int] = []
        self.clusters: list[Cluster] = []

    def __call__(self, config: RunConfig) -> None:
        attempts, interruption = attempt(), Interruption(self.said.append)
        self.said.append(attempts.said())
        self.resumes.append(config.resume)
        self.restarts.append(attempts.made)
        with attempts.cluster(config, self._cluster, interruption) as cluster:
            self.clusters.append(cluster)
            actor, maker = cluster.group("actor", Keeper), cluster.group("maker", Maker)
            self.makers.append(maker.identify()[0][2])
            self.interruption = interruption
            self.body(self, actor)

    def _cluster(self) -> Cluster:
        return Cluster(PLACEMENT, num_threads=1)


def is_closed(cluster: Cluster) -> bool:
    try:
        cluster.calls.check_open()
    except FlowError:
        return True
    return False


def lose(program: Program, actor: WorkerGroup) -> None:
    actor.commit("kill").get()


def test_a_program_whose_process_is_lost_goes_on_with_the_others(config: RunConfig):
    program = Program(lambda self, actor: actor.commit("kill" if len(self.makers) < 3 else "nothing").get())
    with_restarts(program, config)
    assert program.resumes == ["never", "auto", "auto"]
    assert program.restarts == [0, 1, 2]
    assert len(set(program.makers)) == 1 and len(set(map(id, program.clusters))) == 1
    assert program.said[0] == ""
    assert program.said[2].startswith("actor.commit failed on rank 0 (node 0): its process has ended")
    assert program.said[2].endswith("restart 2 of 2: going on after step 2; the processes of maker stay")
    assert is_closed(program.clusters[0])


def test_it_ends_when_it_was_begun_again_as_often_as_allowed(config: RunConfig):
    program = Program(lose)
    with pytest.raises(ProcessLost) as lost:
        with_restarts(program, config)
    assert len(program.makers) == 3 and is_closed(program.clusters[0])
    assert "no checkpoint" not in str(lost.value)


@pytest.mark.parametrize("every", [0, 5])
def test_it_ends_where_there_is_no_checkpoint(config: RunConfig, tmp_path: Path, every: int):
    program = Program(lose)
    changes = {"output": tmp_path / "another", "checkpoint": CheckpointConfig(every=every)}
    with pytest.raises(ProcessLost) as lost:
        with_restarts(program, config.model_copy(update=changes))
    assert len(program.makers) == 1 and is_closed(program.clusters[0])
    remedy = "; no checkpoint was saved to go on from: checkpoint.every=N saves one every N steps"
    assert str(lost.value).partition("\n")[0].endswith(remedy) == (every == 0)


def test_it_ends_where_a_method_raises_the_same_from_the_same_checkpoint_on(config: RunConfig):
    program = Program(lambda self, actor: actor.commit("raise").get())
    with pytest.raises(WorkerError, match="nothing there"):
        with_restarts(program, config)
    assert len(program.makers) == 2


def test_it_goes_on_where_the_same_is_raised_after_a_later_checkpoint(config: RunConfig, tmp_path: Path):
    def body(self: Program, actor: WorkerGroup) -> None:
        if len(self.makers) < 3:
            checkpointed(tmp_path, 2 + len(self.makers))
            actor.commit("raise").get()

    program = Program(body)
    with_restarts(program, config)
    assert program.said[2].endswith("going on after step 4; the processes of maker stay")


@pytest.mark.parametrize("kind", [RefusedError, FailedCheck])
def test_it_ends_where_processes_are_sound_and_refuse(config: RunConfig, kind: type[WorkerError]):
    def body(self: Program, actor: WorkerGroup) -> None:
        with pytest.raises(ProcessLost):
            lose(self, actor)
        raise kind("actor", 0, 0, "update", "ValueError: the loss is not finite")

    program = Program(body)
    with pytest.raises(kind):
        with_restarts(program, config)
    assert len(program.makers) == 1 and is_closed(program.clusters[0])


def test_it_ends_where_it_was_asked_to_end(config: RunConfig):
    def body(self: Program, actor: WorkerGroup) -> None:
        self.interruption.signal = signal.SIGINT
        lose(self, actor)

    program = Program(body)
    with pytest.raises(ProcessLost):
        with_restarts(program, config)
    assert len(program.makers) == 1 and is_closed(program.clusters[0])


def test_what_a_driver_raises_itself_ends_it(config: RunConfig):
    def body(self: Program, actor: WorkerGroup) -> None:
        raise ArithmeticError("a wrong number")

    program = Program(body)
    with pytest.raises(ArithmeticError):
        with_restarts(program, config)
    assert len(program.makers) == 1 and is_closed(program.clusters[0])


def test_a_program_that_is_called_alone_is_begun_once(config: RunConfig):
    program = Program(lose)
    with pytest.raises(ProcessLost):
        program(config)
    assert len(program.makers) == 1 and is_closed(program.clusters[0])
