"""An actor and a rollout that only write down what they are asked, in the order in which all processes are asked.

Importable, so that Ray's processes find them. Their methods are declared as those of the real ones.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.controller.worker import Dispatch, Worker, register

WAITS_S = 30.0
Line = list[Any]
"""Role, rank, method, arguments."""


def read(diary: Path) -> list[Line]:
    return [json.loads(line) for line in diary.read_text().splitlines()]


class Recording(Worker):
    """Args:
    diary: a file to which every process appends.
    peers: ranks of the other role that a call through a link is to meet; 0 is not to wait for any.
    """

    def __init__(self, diary: Path, *, peers: int = 0, yields: bool = False) -> None:
        self.diary, self.peers = diary, peers

    @classmethod
    def can_offload_device(cls, device: str, diary: Path, *, peers: int = 0, yields: bool = False) -> bool:
        return yields

    def write(self, method: str, **arguments: Any) -> None:
        with self.diary.open("a") as file:
            file.write(json.dumps([self.context.role, self.rank, method, arguments]) + "\n")

    def meet(self, role: str, method: str, own: str) -> None:
        """Returns when each peer is at this call too, as a collective does."""
        if not self.peers:
            return
        lines, mine = read(self.diary), [self.context.role, self.rank, own]
        count = sum(line[:3] == mine for line in lines)
        self.wait(lambda said: all(said.count([role, rank, method]) >= count for rank in range(self.peers)))

    def wait(self, done: Callable[[list[Line]], bool]) -> None:
        deadline = time.monotonic() + WAITS_S
        while not done([line[:3] for line in read(self.diary)]):
            assert time.monotonic() < deadline, "the others never came"
            time.sleep(0.02)


class Sending(Recording):
    """The actor, of three parts."""

    CHUNKS = 3

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def num_chunks(self, chunk_mb: float, dtype: str | None = None) -> int:
        self.write("num_chunks", chunk_mb=chunk_mb, dtype=dtype)
        return self.CHUNKS

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def weights(self, chunk: int = 0, chunk_mb: float | None = None, dtype: str | None = None) -> dict[str, Any]:
        self.write("weights", chunk=chunk, chunk_mb=chunk_mb, dtype=dtype)
        return {"part": chunk}

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def describe_weights(self, chunk: int, chunk_mb: float, dtype: str | None = None) -> Any:
        self.write("describe_weights", chunk=chunk, chunk_mb=chunk_mb, dtype=dtype)
        return f"description {chunk}"

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def share_weights(self, chunk: int, chunk_mb: float, dtype: str | None = None, after: object = None) -> Any:
        self.write("share_weights", chunk=chunk, chunk_mb=chunk_mb, dtype=dtype, after=after)
        return f"part {chunk} on rank {self.rank}"

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def release_weights(self, after: object = None) -> None:
        self.write("release_weights", after=after)

    @register(Dispatch.RANK_ZERO, memory=())
    def open_link(self) -> tuple[str, int]:
        self.write("open_link")
        return "there", 1234

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def join_link(self, link: Mapping[str, Any]) -> None:
        self.write("join_link", link=link)
        self.meet("rollout", "join_link", "join_link")

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def send_weights(self, chunk: int, chunk_mb: float, dtype: str | None = None) -> None:
        self.write("send_weights", chunk=chunk, chunk_mb=chunk_mb, dtype=dtype)
        self.meet("rollout", "load_sent", "send_weights")


class Receiving(Recording):
    """The rollout; reading a part takes a while where there are peers."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def set_version(self, version: int) -> None:
        self.write("set_version", version=version)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="chunk", memory=("weights",))
    def load_weights(self, weights: Mapping[str, Any], version: int, chunk: int = 0, of: int = 1) -> None:
        self.write("load_weights", weights=weights, version=version, chunk=chunk, of=of)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="chunk", memory=("weights",))
    def load_shared(self, parts: Sequence[Any], version: int, chunk: int, of: int) -> Any:
        time.sleep(0.1 * (self.peers > 0))
        self.write("load_shared", parts=parts, version=version, chunk=chunk, of=of)
        return f"{self.rank} has read {chunk} of {version}"

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=())
    def join_link(self, link: Mapping[str, Any]) -> None:
        self.write("join_link", link=link)
        self.meet("actor", "join_link", "join_link")

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="chunk", memory=("weights",))
    def load_sent(self, described: Any, version: int, chunk: int, of: int) -> None:
        self.write("load_sent", described=described, version=version, chunk=chunk, of=of)
        self.meet("actor", "send_weights", "load_sent")
