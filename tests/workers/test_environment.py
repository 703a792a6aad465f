"""Episodes that an environment worker runs for the connections of rollout workers."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.environments.base import ModelResponse
from flowrl.environments.requests import Reply, Reset, Step
from flowrl.user_code.channel import RequestClient, RequestServer
from tests.environments.test_environment_host import ASYNC, ask, make_host, mark

__all__ = ["mark"]

KEY = b"key"


def request(client: RequestClient, value: Any) -> Reply:
    client.send([("key", value)])
    ((_, reply),) = client.receive(200)
    return reply


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_text() == text):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("mark")
def test_the_episodes_of_a_lost_connection_are_closed(tmp_path: Path) -> None:
    with (
        make_host(ASYNC, {"folder": str(tmp_path)}) as host,
        closing(RequestServer("127.0.0.1", 0, KEY, host.submit, host.discard)) as server,
        closing(RequestClient([server.address], KEY)) as kept,
    ):
        lost = RequestClient([server.address], KEY)
        for name in ("a", "b", "moved"):
            assert request(lost, Reset(name, {})).failure is None
        assert request(kept, Reset("kept", {})).failure is None
        # An episode that continues over another connection belongs to that one.
        assert request(kept, Step("moved", ModelResponse("text"))).failure is None
        lost.close()
        wait_for_text(tmp_path / "closed", "xx")
        for name in ("a", "b"):
            assert request(kept, Step(name, ModelResponse("text"))).failure == "lost"
        for name in ("kept", "moved"):
            assert request(kept, Step(name, ModelResponse("text", turn=1))).failure is None


@pytest.mark.usefixtures("mark")
def test_an_abandoned_episode_that_runs_alone_does_not_delay_others() -> None:
    with make_host(ASYNC) as host:
        for name in ("first", "waits", "second"):
            for _ in range(2):  # afterwards, the episode gets a process of its own
                ask(host, Reset(name, {"kind": "kill"}))
                assert ask(host, Step(name, ModelResponse("text"))).failure == "lost"
        assert host.submit(Reset("first", {}), "lost").result(200).failure is None
        waiting = host.submit(Reset("waits", {}), "lost")
        following = host.submit(Reset("second", {}), "kept")
        host.discard("lost")
        assert waiting.result(200).failure == "closed"
        assert following.result(200).failure is None
