"""Who has the device: roles of one process make room for each other."""

from flowrl.controller.host.resident_worker import ResidentWorker
from flowrl.controller.worker import Dispatch, Worker, register
from tests.conftest import ClusterMaker


class Resident(Worker):
    """Writes down when it moves, into a list that the roles share."""

    def __init__(self, moves: list[str], borrows_from: str | None = None) -> None:
        self.moves, self.borrows_from = moves, borrows_from

    @property
    def weight_owners(self) -> tuple[Worker, ...]:
        lender = None if self.borrows_from is None else self.peer(self.borrows_from)
        return () if lender is None else (lender,)

    def offload(self, *, keep_weights: bool) -> None:
        self.moves.append(f"{self.context.role} {'keeps its weights' if keep_weights else 'leaves'}")

    def onload(self) -> None:
        self.moves.append(f"{self.context.role} comes")

    @register(Dispatch.ONE_TO_ALL)
    def work(self) -> None:
        self.moves.append(f"{self.context.role} works")


def test_other_roles_are_offloaded_before_a_role_is_loaded_until_their_next_call(open_cluster: ClusterMaker) -> None:
    moves: list[str] = []
    cluster = open_cluster("inline", {"main": [1]}, dict.fromkeys(("actor", "critic"), "main"))
    actor = cluster.group("actor", Resident, moves)
    critic = cluster.group("critic", Resident, moves)
    assert moves == ["actor leaves"], "a role that is made needs room, too"
    moves.clear()
    for group in (actor, actor, critic, actor):
        group.work()
    assert moves == [
        *("critic leaves", "actor comes", "actor works", "actor works"),
        *("actor leaves", "critic comes", "critic works"),
        *("critic leaves", "actor comes", "actor works"),
    ]


def test_an_owner_keeps_shared_weights_on_the_device(open_cluster: ClusterMaker) -> None:
    moves: list[str] = []
    roles = ("actor", "critic", "rollout")
    cluster = open_cluster("inline", {"main": [1]}, dict.fromkeys(roles, "main"))
    groups = {role: cluster.group(role, Resident, moves, "actor" if role == "rollout" else None) for role in roles}
    moves.clear()
    groups["rollout"].work()
    assert moves == [
        *("actor keeps its weights", "critic leaves"),
        *("actor comes", "rollout comes", "rollout works"),
    ]


def test_a_failed_onload_is_retried() -> None:
    class Stuck(Worker):
        fails = True

        def onload(self) -> None:
            if self.fails:
                raise MemoryError("no room")

    worker = Stuck()
    turns = ResidentWorker({"actor": worker})
    for _ in range(2):
        try:
            turns.activate("actor")
        except MemoryError:
            continue
        raise AssertionError("the second call must ask again")
    worker.fails = False
    turns.activate("actor")
