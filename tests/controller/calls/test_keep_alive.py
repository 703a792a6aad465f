"""Pings replace the processes of workers that serve other processes, although no call to them is in flight."""

import os
import signal
import time
from pathlib import Path

import pytest

from flowrl import Batch, Cluster, Dispatch, Worker, register
from tests.conftest import ClusterMaker
from tests.controller.faulty_workers import Scorer

BATCH = Batch.from_columns({"x": [1, 2]})
LIMIT_S, DEADLINE_S = 120.0, 6.0


class Server(Worker):
    """Writes the id of its process to a file, in place of a server that other processes use."""

    stateless = True

    @register(Dispatch.ONE_TO_ALL, replay=True, memory=())
    def serve(self, path: Path) -> int:
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def echo(self, value: list[str]) -> list[str]:
        return value


class SlowServer(Server):
    """Needs longer than a deadline to serve again after a loss."""

    @register(Dispatch.ONE_TO_ALL, replay=True, memory=())
    def serve(self, path: Path) -> int:
        if path.exists():
            time.sleep(2 * DEADLINE_S)
        return super().serve(path)


class Client(Worker):
    """Waits for a server."""

    stateless = True

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for_other(self, path: Path, process_id: int) -> str:
        """Waits until another process than this one serves."""
        while path.read_text() == str(process_id):
            time.sleep(0.01)
        return path.read_text()


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def cluster(ray_session: None, open_cluster: ClusterMaker, messages: list[str]) -> Cluster:
    roles = {"server": "main", "scorer": "main", "client": "other"}
    return open_cluster("ray", {"main": [1], "other": [1]}, roles, num_threads=1, restarts=3, notify=messages.append)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fact"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "SIGSTOP")])
def test_a_server_without_calls_in_flight_is_replaced(
    cluster: Cluster, messages: list[str], tmp_path: Path, number: signal.Signals, fact: str
) -> None:
    cluster.calls.timeout_s = 10.0
    server = cluster.group("server", Server)
    (process_id,) = server.serve(tmp_path / "id")
    server.keep_alive()
    os.kill(process_id, number)
    cluster.calls.wait_until(lambda: (tmp_path / "id").read_text() != str(process_id), LIMIT_S)
    assert any("server" in message and "rank 0" in message and fact in message for message in messages)
    assert not any(event.method == "ping" for event in cluster.calls.events)


@pytest.mark.slow
def test_a_server_is_restored_although_a_call_to_it_waits_for_one_of_its_clients(
    cluster: Cluster, messages: list[str], tmp_path: Path
) -> None:
    """The call to the server needs the result of its client, which needs the server."""
    server, client = cluster.group("server", Server), cluster.group("client", Client)
    (process_id,) = server.serve(tmp_path / "id")
    server.keep_alive()
    result = server.echo(client.wait_for_other(tmp_path / "id", process_id))
    os.kill(process_id, signal.SIGKILL)
    ((served_by,),) = result.get(LIMIT_S)
    assert served_by == (tmp_path / "id").read_text() != str(process_id)
    assert any("taken over" in message for message in messages)
    assert cluster.calls.get_num_replacements(server.slots[0]) == 1


@pytest.mark.slow
def test_the_deadline_of_a_client_does_not_count_the_restoration_of_its_server(
    cluster: Cluster, messages: list[str], tmp_path: Path
) -> None:
    server, client = cluster.group("server", SlowServer), cluster.group("client", Client)
    (process_id,) = server.serve(tmp_path / "id")
    server.keep_alive()
    cluster.calls.timeout_s = DEADLINE_S
    result = client.wait_for_other(tmp_path / "id", process_id)
    os.kill(process_id, signal.SIGKILL)
    assert result.get(LIMIT_S) == [(tmp_path / "id").read_text()]
    assert not any("deadline" in message for message in messages)


@pytest.mark.slow
def test_a_server_in_the_process_of_another_role_serves_before_the_call_of_this_role(
    cluster: Cluster, tmp_path: Path
) -> None:
    (process_id,) = cluster.group("server", Server).serve(tmp_path / "id")
    scorer = cluster.group("scorer", Scorer, 10)
    os.kill(process_id, signal.SIGKILL)
    assert scorer.score(BATCH).get("score").tolist() == [10, 20]
    assert (tmp_path / "id").read_text() != str(process_id)


def test_inline_workers_are_not_pinged(open_cluster: ClusterMaker, tmp_path: Path) -> None:
    cluster = open_cluster("inline", {"main": [1]}, {"server": "main"})
    server = cluster.group("server", Server)
    server.keep_alive()
    assert server.serve(tmp_path / "id") == [os.getpid()]
    cluster.calls.wait_until(lambda: not cluster.calls.in_flight(), LIMIT_S)
