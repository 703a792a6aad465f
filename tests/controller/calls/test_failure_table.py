"""The failure table of docs/failures.md under a virtual clock: rank, method, cause and time of each error.

The driver checks calls every 0.1 s while it waits. A call that runs from the first check at 0.1 s has passed its
deadline of 60.05 s at the check at 60.2 s. The deadline lies between two checks, so that rounding has no effect.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tensordict import TensorDict

from flowrl import Batch, Cluster, Dispatch, Worker, WorkerGroup, make_tensordict, register
from flowrl.config import UserError
from flowrl.controller.errors import DeadlineError, ProcessLost, WorkerError, WorkerUserError
from tests.conftest import ClusterMaker
from tests.controller.faulty_backend import START_S, CallFault, Fault, FaultyBackend, NodeLoss, ProcessFault
from tests.controller.faulty_workers import Doubling
from tests.errors import missing_facts

TIMEOUT_S, START_TIMEOUT_S = 60.05, 100.05
FIRST_LATE_S = 60.2
"""Time of the first check at which a call without an end is late."""

BATCH = Batch.from_columns({"x": [1, 2]})


class Trainer(Worker):
    """Two stateful ranks. They wait for each other in `reduce`."""

    def __init__(self, bad_rank: int | None = None) -> None:
        self.fail(bad_rank)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def update(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def reduce(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False, timeout_s=600.05)
    def save(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fail(self, bad_rank: int | None) -> None:
        if self.rank == bad_rank:
            raise KeyError("nothing there")

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def refuse(self) -> None:
        raise UserError("the input is invalid")

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("score",))
    def score(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"score": table["rows", "x"]})


class Judge(Worker):
    """One stateless rank, whose process is replaced."""

    stateless = True

    def __init__(self, can_return: bool = True) -> None:
        self.offset = 0
        if self.context.replaced and not can_return:
            raise ArithmeticError("no weights")

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=())
    def load(self, offset: int) -> None:
        self.offset = offset

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=())
    def add(self, offset: int, bucket: int) -> None:
        self.offset = offset + (self.offset if bucket else 0)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("score",))
    def score(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"score": table["rows", "x"] + self.offset})

    @register(Dispatch.RANK_ZERO, blocking=False, resend=False)
    def take(self) -> int:
        return self.offset

    @register(Dispatch.RANK_ZERO, blocking=False)
    def fail(self) -> None:
        raise KeyError("nothing there")

    @register(Dispatch.RANK_ZERO, blocking=False)
    def refuse(self) -> None:
        raise UserError("the input is invalid")


class Run:
    """A cluster with an actor and a critic on two nodes, a judge, and a reader of results."""

    def __init__(self, open_cluster: ClusterMaker, *faults: Fault) -> None:
        self.backend = FaultyBackend(*faults, collectives=("reduce",))
        self.messages: list[tuple[float, str]] = []
        """(time, text) of messages to the user."""
        self.cluster: Cluster = open_cluster(
            self.backend,
            {"train": [1, 1], "judges": [1], "readers": [1]},
            {"actor": "train", "critic": "train", "judge": "judges", "reader": "readers"},
            devices=(3, 1),
            num_threads=1,
            call_timeout_s=TIMEOUT_S,
            start_timeout_s=START_TIMEOUT_S,
            notify=lambda text: self.messages.append((self.now_s, text)),
        )
        self.open_groups()

    def open_groups(self) -> None:
        self.actor: WorkerGroup = self.cluster.group("actor", Trainer)
        self.critic: WorkerGroup = self.cluster.group("critic", Trainer)
        self.judge: WorkerGroup = self.cluster.group("judge", Judge)
        self.reader: WorkerGroup = self.cluster.group("reader", Doubling)

    @property
    def now_s(self) -> float:
        return self.backend.clock.monotonic()

    def idle(self, until_s: float = float("inf")) -> None:
        """The driver waits without a call."""
        self.cluster.calls.wait_until(lambda: self.now_s >= until_s)

    def raised(self, act: Callable[["Run"], object]) -> WorkerError:
        with pytest.raises(WorkerError) as caught:
            act(self)
        return caught.value


@dataclass(frozen=True)
class Failure:
    """An error that ends a failure group. `raised_s` is the time at which the driver raises it."""

    act: Callable[[Run], object]
    error: type[WorkerError]
    name: tuple[str, int, str]
    """(role, rank, method)"""
    raised_s: float
    facts: tuple[object, ...]
    faults: tuple[Fault, ...] = ()


def update(run: Run) -> None:
    run.actor.update().get()


def reduce(run: Run) -> None:
    run.actor.reduce().get()


def idle(run: Run) -> None:
    run.idle()


def score(run: Run) -> list[int]:
    return run.judge.score(BATCH).get("score").tolist()


def update_after_idling(run: Run) -> None:
    run.idle(1.0)
    update(run)


def update_in_the_background(run: Run) -> None:
    run.actor.update()
    run.idle()


def save_and_reduce(run: Run) -> None:
    run.actor.save()
    reduce(run)


def read_scores(run: Run) -> None:
    run.reader.double(run.actor.score(BATCH)).get("double")


def on_rank_1(kind: str, method: str = "update", after_s: float = 0.0, **settings: int) -> CallFault:
    return CallFault(kind, "actor", method, 1, after_s, **settings)  # pyright: ignore[reportArgumentType] (a kind)


def of_judge(kind: str, method: str = "score", after_s: float = 0.0, **settings: int) -> CallFault:
    return CallFault(kind, "judge", method, 0, after_s, **settings)  # pyright: ignore[reportArgumentType] (a kind)


SLOW_ON_BOTH = (CallFault("slow", "actor", "update", 0, 50.0), CallFault("slow", "actor", "update", 1, 50.0))
LOST_NODE = NodeLoss(5.95, 1, "node gpu-2 is lost")
LOCATION = ("update", "worker.py", 7)

STATEFUL = {
    "raises": Failure(lambda run: run.actor.fail(1).get(), WorkerError, ("actor", 1, "fail"), 0.0, ("KeyError",)),
    "rejects its input": Failure(
        lambda run: run.actor.refuse().get(), WorkerUserError, ("actor", 0, "refuse"), 0.0, ("invalid",)
    ),
    "is killed": Failure(
        update, ProcessLost, ("actor", 1, "update"), 5.0, ("SIGKILL",), (on_rank_1("exit", after_s=5.0),)
    ),
    "exits": Failure(
        update, ProcessLost, ("actor", 1, "update"), 5.0, (3,), (on_rank_1("exit", after_s=5.0, exit_code=3),)
    ),
    "is killed between calls": Failure(
        update_after_idling, ProcessLost, ("actor", 1, "update"), 1.0, ("SIGKILL",), (ProcessFault(0.5, "train", 1),)
    ),
    "is killed while its peer waits in a collective": Failure(
        reduce, ProcessLost, ("actor", 1, "reduce"), 5.0, ("SIGKILL",), (on_rank_1("exit", "reduce", 5.0),)
    ),
    "is killed while idle, before its peer loses the connection": Failure(
        update,
        ProcessLost,
        ("actor", 1, ""),
        5.0,
        ("SIGKILL",),
        (ProcessFault(4.0, "train", 1), CallFault("disconnect", "actor", "update", 0, 5.0)),
    ),
    "is killed after its peer has lost the connection": Failure(
        update,
        ProcessLost,
        ("actor", 1, "update"),
        6.5,
        ("SIGKILL",),
        (on_rank_1("exit", after_s=6.5), CallFault("disconnect", "actor", "update", 0, 5.0)),
    ),
    # The search for a cause takes 2 s, and the first check after it is at 7.1 s.
    "loses the connection for an unknown reason": Failure(
        update,
        WorkerError,
        ("actor", 1, "update"),
        7.1,
        ("Connection", "closed"),
        (on_rank_1("disconnect", after_s=5.0),),
    ),
    "hangs": Failure(
        update,
        DeadlineError,
        ("actor", 1, "update"),
        FIRST_LATE_S,
        ("call_timeout_s", TIMEOUT_S, *LOCATION),
        (on_rank_1("hang"),),
    ),
    "hangs while its peer waits in a collective": Failure(
        reduce,
        DeadlineError,
        ("actor", 1, "reduce"),
        FIRST_LATE_S,
        ("call_timeout_s", TIMEOUT_S, "worker.py", 0),
        (on_rank_1("hang", "reduce"),),
    ),
    "hangs in an earlier call that its peer has finished": Failure(
        save_and_reduce,
        DeadlineError,
        ("actor", 1, "save"),
        FIRST_LATE_S,
        ("call_timeout_s", TIMEOUT_S, "save", "actor.reduce", 0),
        (on_rank_1("hang", "save"),),
    ),
    "is stopped": Failure(
        reduce, DeadlineError, ("actor", 1, "reduce"), FIRST_LATE_S, ("SIGSTOP",), (on_rank_1("stop", "reduce"),)
    ),
    "hangs while the driver waits without a call": Failure(
        update_in_the_background, DeadlineError, ("actor", 1, "update"), FIRST_LATE_S, LOCATION, (on_rank_1("hang"),)
    ),
    # The second call checks the first one, at 0 s.
    "hangs, and another pool reads its result": Failure(
        read_scores, DeadlineError, ("actor", 1, "score"), 60.1, (TIMEOUT_S,), (on_rank_1("hang", "score"),)
    ),
    "hangs in its constructor": Failure(
        update, DeadlineError, ("actor", 1, "__init__"), 100.1, ("start_timeout_s",), (on_rank_1("hang", "__init__"),)
    ),
    # The other rank continues, so that the failure is read at the next check.
    "runs on a node that is lost": Failure(
        update, ProcessLost, ("actor", 1, "update"), 6.0, ("gpu-2",), (*SLOW_ON_BOTH, LOST_NODE)
    ),
    # Nodes are checked at the first check that is more than 1 s after the previous one: at 1.1, 2.2, ..., 6.6 s.
    "is idle on a node that is lost": Failure(idle, ProcessLost, ("actor", 1, ""), 6.6, ("gpu-2",), (LOST_NODE,)),
}
"""What happens to rank 1 of the actor -> the failure."""


@pytest.mark.parametrize("case", STATEFUL.values(), ids=STATEFUL)
def test_a_failure_of_a_stateful_rank_is_blamed_on_it_and_ends_its_failure_group(
    case: Failure, open_cluster: ClusterMaker
) -> None:
    run = Run(open_cluster, *case.faults)
    error = run.raised(case.act)
    assert run.now_s == pytest.approx(case.raised_s)
    assert type(error) is case.error and (error.role, error.rank, error.method) == case.name
    assert error.node == error.rank, "each rank has its own node"
    assert not missing_facts(str(error), *case.facts)
    assert run.raised(lambda run: run.critic.update()) is error
    assert score(run) == [1, 2]


@dataclass(frozen=True)
class Recovery:
    """A loss of the judge's process that the driver repairs. `done_s` is the time of the result."""

    done_s: float
    reported_s: float
    """Time of the message about the loss."""
    facts: tuple[object, ...]
    faults: tuple[Fault, ...]


# Lost processes are checked at 1.1, 2.2, ..., 5.5 s.
REPLACED = {
    "is killed": Recovery(5.0 + START_S, 5.5, ("judge", 0, "score", "SIGKILL"), (of_judge("exit", after_s=5.0),)),
    "exits": Recovery(5.0 + START_S, 5.5, (3,), (of_judge("exit", after_s=5.0, exit_code=3),)),
    "hangs": Recovery(
        FIRST_LATE_S + START_S,
        FIRST_LATE_S,
        ("judge.score", TIMEOUT_S, "worker.py"),
        (of_judge("hang"),),
    ),
    "is stopped": Recovery(FIRST_LATE_S + START_S, FIRST_LATE_S, ("judge.score", "SIGSTOP"), (of_judge("stop"),)),
    "is killed again while its replacement starts": Recovery(
        5.0 + 2 * START_S,
        5.5,
        ("judge", "score", "SIGKILL"),
        (of_judge("exit", after_s=5.0), of_judge("exit", "__init__", num_before=1)),
    ),
    "is killed, and its replacement starts later than the deadline of the call": Recovery(
        5.0 + START_S + 90.0,
        5.5,
        ("SIGKILL",),
        (of_judge("exit", after_s=5.0), of_judge("slow", "__init__", 90.0, num_before=1)),
    ),
    # The start is found at 60.2 s. The stacks are collected again after a deadline each, at 120.3 s and 180.4 s.
    "is killed, and its replacement hangs while it starts": Recovery(
        180.4 + START_S,
        5.5,
        ("SIGKILL",),
        (of_judge("exit", after_s=5.0), of_judge("hang", "__init__", num_before=1)),
    ),
    # An idle process counts as starting.
    "never receives the call": Recovery(180.4 + START_S, 180.4, ("judge.score", START_TIMEOUT_S), (of_judge("lose"),)),
}
"""What happens to the judge -> the recovery."""


@pytest.mark.parametrize("case", REPLACED.values(), ids=REPLACED)
def test_a_lost_stateless_process_is_reported_and_replaced(case: Recovery, open_cluster: ClusterMaker) -> None:
    run = Run(open_cluster, *case.faults)
    run.judge.load(10)
    assert score(run) == [11, 12]
    assert run.now_s == pytest.approx(case.done_s)
    reported_s, text = run.messages[0]
    assert reported_s == pytest.approx(case.reported_s) and not missing_facts(text, *case.facts)
    update(run)


STATELESS = {
    "raises": Failure(lambda run: run.judge.fail().get(), WorkerError, ("judge", 0, "fail"), 0.0, ("KeyError",)),
    # Three replacements, with 3 s each.
    "is killed in each process": Failure(
        score,
        ProcessLost,
        ("judge", 0, "score"),
        4 * 5.0 + 3 * START_S,
        ("SIGKILL",),
        (of_judge("exit", after_s=5.0, times=4),),
    ),
    # The replacement runs the call at 63.2 s. Its clock starts again at the deadline of the first check, at 120.4 s.
    "hangs in each process": Failure(
        score,
        DeadlineError,
        ("judge", 0, "score"),
        180.5,
        ("call_timeout_s", TIMEOUT_S, "worker.py"),
        (of_judge("hang", times=2),),
    ),
    "runs on a node that is lost": Failure(
        score,
        ProcessLost,
        ("judge", 0, "score"),
        5.0,
        ("gpu-1",),
        (of_judge("slow", after_s=50.0), NodeLoss(5.0, 0, "node gpu-1 is lost")),
    ),
}
"""What happens to the judge -> the failure."""


@pytest.mark.parametrize("case", STATELESS.values(), ids=STATELESS)
def test_a_failure_of_a_stateless_rank_ends_its_failure_group(case: Failure, open_cluster: ClusterMaker) -> None:
    run = Run(open_cluster, *case.faults)
    error = run.raised(case.act)
    assert run.now_s == pytest.approx(case.raised_s)
    assert type(error) is case.error and (error.role, error.rank, error.method) == case.name
    assert not missing_facts(str(error), *case.facts)
    assert run.raised(lambda run: run.judge.score(BATCH)) is error
    if not run.cluster.has_lost_nodes():
        update(run)


def test_a_replacement_that_cannot_construct_its_worker_ends_the_failure_group(open_cluster: ClusterMaker) -> None:
    backend = FaultyBackend(of_judge("exit", after_s=5.0))
    judge = open_cluster(backend, {"main": [1]}, {"judge": "main"}).group("judge", Judge, can_return=False)
    scores = judge.score(BATCH)
    with pytest.raises(WorkerError) as caught:
        scores.get("score")
    assert backend.clock.monotonic() == 5.0 + START_S
    assert (caught.value.role, caught.value.method) == ("judge", "__init__")
    assert caught.value.cause.startswith("ArithmeticError")


def test_invalid_input_of_a_stateless_worker_ends_no_process(open_cluster: ClusterMaker) -> None:
    run = Run(open_cluster)
    error = run.raised(lambda run: run.judge.refuse().get())
    assert type(error) is WorkerUserError and run.raised(update) is error
    run.cluster.calls.abandon_all(10.0)
    assert score(run) == [1, 2]


def test_every_failure_group_raises_its_own_failure(open_cluster: ClusterMaker) -> None:
    run = Run(open_cluster)
    for group, rank in ((run.judge, ()), (run.actor, (1,))):
        error = run.raised(lambda run, group=group, rank=rank: group.fail(*rank).get())
        assert (error.role, error.method) == (group.role, "fail")


def test_calls_of_a_lost_process_see_the_state_at_their_submission(open_cluster: ClusterMaker) -> None:
    run = Run(open_cluster, of_judge("exit"))
    results = [run.judge.score(BATCH)]
    for offset in (10, 20, 30):
        run.judge.load(offset)
        results.append(run.judge.score(BATCH))
    assert [result.get("score").tolist() for result in results] == [[1, 2], [11, 12], [21, 22], [31, 32]]


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_process_that_is_lost_between_two_buckets_receives_all_of_them_again(
    num_before: int, open_cluster: ClusterMaker
) -> None:
    run = Run(open_cluster, of_judge("exit", "add", num_before=num_before))
    for bucket, offset in enumerate((10, 1, 2)):
        run.judge.add(offset, bucket)
    assert score(run) == [14, 15]


def test_a_lost_call_without_retry_raises_and_the_run_continues(open_cluster: ClusterMaker) -> None:
    run = Run(open_cluster, of_judge("exit", "take", 5.0, times=2))
    run.judge.load(10)
    for number, lost_s in ((1, 5.0), (2, 5.0 + START_S + 5.0)):
        error = run.raised(lambda run: run.judge.take().get())
        assert type(error) is ProcessLost and (error.role, error.rank, error.method) == ("judge", 0, "take")
        assert run.now_s == lost_s
        assert score(run) == [11, 12] and run.now_s == lost_s + START_S
        assert run.cluster.calls.get_num_replacements(run.judge.slots[0]) == number
    assert run.judge.take().get() == 10


def test_an_idle_process_that_is_pinged_is_replaced_after_a_stop(open_cluster: ClusterMaker) -> None:
    """Pings are sent about once per second, and are late after half a deadline."""
    run = Run(open_cluster, ProcessFault(10.0, "judges", kind="stop"))
    run.judge.load(10)
    run.judge.keep_alive()
    run.idle(60.0)
    (late_s, late), (replaced_s, _) = run.messages
    assert late_s == pytest.approx(40.2) and not missing_facts(late, "judge.ping", "SIGSTOP", TIMEOUT_S / 2)
    assert replaced_s == pytest.approx(late_s + START_S)
    assert score(run) == [11, 12]
    assert not any(event.method == "ping" for event in run.cluster.calls.events)


def test_the_deadline_of_a_call_does_not_count_the_restoration_of_a_server(open_cluster: ClusterMaker) -> None:
    """The call of the actor may wait for the judge, whose replacement takes 3 s and 40 s."""
    run = Run(
        open_cluster,
        CallFault("slow", "actor", "update", 0, 100.0),
        ProcessFault(30.0, "judges"),
        of_judge("slow", "__init__", 40.0, num_before=1),
    )
    run.judge.keep_alive()
    update(run)
    assert run.now_s == pytest.approx(100.1, abs=0.11)


def test_a_restart_keeps_recoverable_processes_and_starts_the_others_again(open_cluster: ClusterMaker) -> None:
    run = Run(open_cluster, on_rank_1("exit", after_s=5.0))
    run.judge.load(10)
    run.raised(update)
    assert run.cluster.restart() == ("judge",)
    run.open_groups()
    assert run.actor.update().get() == [0, 1]
    assert score(run) == [11, 12]


def test_calls_in_flight_at_a_restart_are_awaited_for_a_minute(open_cluster: ClusterMaker) -> None:
    run = Run(open_cluster, on_rank_1("exit", after_s=5.0), of_judge("slow", after_s=50.0, times=2))
    scores = run.judge.score(BATCH)
    run.raised(update)
    run.cluster.restart()
    assert scores.done() and run.now_s == 50.0
