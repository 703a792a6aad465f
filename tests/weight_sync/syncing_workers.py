"""An actor and a rollout that record their calls in a common log file, with the contracts of the real workers."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.config import LoraConfig
from flowrl.controller.worker import Dispatch, Worker, register

WAITS_S = 60.0
Line = list[Any]
"""[role, rank, method, arguments]"""


def read(log: Path) -> list[Line]:
    """Returns the calls so far, without a last line that another process is still writing."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Recording(Worker):
    """Appends every call to a log file.

    Args:
        log: file that all processes append to.
        peers: number of ranks of the other role that a collective call waits for; 0 does not wait.
    """

    def __init__(self, log: Path, *, peers: int = 0, yields: bool = False) -> None:
        self.log, self.peers = log, peers

    @classmethod
    def can_offload_device(cls, device: str, log: Path, *, peers: int = 0, yields: bool = False) -> bool:
        return yields

    def write(self, method: str, **arguments: Any) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps([self.context.role, self.rank, method, arguments]) + "\n")

    def meet(self, role: str, method: str, own: str) -> None:
        """Waits until each peer has reached the same call, like a collective."""
        if not self.peers:
            return
        lines, mine = read(self.log), [self.context.role, self.rank, own]
        count = sum(line[:3] == mine for line in lines)
        self.wait(lambda calls: all(calls.count([role, rank, method]) >= count for rank in range(self.peers)))

    def wait(self, done: Callable[[list[Line]], bool]) -> None:
        deadline = time.monotonic() + WAITS_S
        while not done([line[:3] for line in read(self.log)]):
            assert time.monotonic() < deadline, "a peer did not reach the collective"
            time.sleep(0.02)


class RecordingActor(Recording):
    """An actor whose weights have three buckets."""

    BUCKETS = 3

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def num_buckets(self, bucket_mb: float, dtype: str | None = None) -> int:
        self.write("num_buckets", bucket_mb=bucket_mb, dtype=dtype)
        return self.BUCKETS

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def weights(self, bucket: int = 0, bucket_mb: float | None = None, dtype: str | None = None) -> dict[str, Any]:
        self.write("weights", bucket=bucket, bucket_mb=bucket_mb, dtype=dtype)
        return {"bucket": bucket}

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def adapter(self) -> dict[str, Any]:
        self.write("adapter")
        return {"adapter": self.rank}

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def describe_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None) -> Any:
        self.write("describe_weights", bucket=bucket, bucket_mb=bucket_mb, dtype=dtype)
        return f"description {bucket}"

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=("weights",))
    def begin_sharing(self) -> Any:
        self.write("begin_sharing")
        return f"{self.rank} has begun"

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def share_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None, after: object = None) -> Any:
        self.write("share_weights", bucket=bucket, bucket_mb=bucket_mb, dtype=dtype, after=after)
        return f"bucket {bucket} on rank {self.rank}"

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def release_weights(self, after: object = None) -> None:
        self.write("release_weights", after=after)

    @register(Dispatch.RANK_ZERO, memory=())
    def open_transfer_group(self, num_receivers: int, all_send: bool) -> Any:
        self.write("open_transfer_group", num_receivers=num_receivers, all_send=all_send)
        return "the group"

    @register(Dispatch.ALL_TO_ONE, blocking=False, memory=())
    def join_transfer_group(self, group: Any) -> None:
        self.write("join_transfer_group", group=group)
        self.meet("rollout", "join_transfer_group", "join_transfer_group")

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def broadcast_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None) -> None:
        self.write("broadcast_weights", bucket=bucket, bucket_mb=bucket_mb, dtype=dtype)
        self.meet("rollout", "load_broadcast", "broadcast_weights")


class RecordingRollout(Recording):
    """A rollout; with peers, loading an IPC bucket takes 0.1 s."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def set_version(self, version: int) -> None:
        self.write("set_version", version=version)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",))
    def load_weights(self, weights: Mapping[str, Any], version: int, bucket: int = 0, of: int = 1) -> None:
        self.write("load_weights", weights=weights, version=version, bucket=bucket, of=of)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=("weights",))
    def load_adapter(self, adapter: Mapping[str, Any], lora: LoraConfig, bucket_mb: float, version: int) -> None:
        self.write("load_adapter", adapter=adapter, rank=lora.rank, bucket_mb=bucket_mb, version=version)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",), evicts=False)
    def load_ipc(self, shared: Sequence[Any], version: int, bucket: int, of: int) -> Any:
        time.sleep(0.1 * (self.peers > 0))
        self.write("load_ipc", shared=shared, version=version, bucket=bucket, of=of)
        return f"{self.rank} has loaded {bucket} of {version}"

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=())
    def join_transfer_group(self, group: Any) -> None:
        self.write("join_transfer_group", group=group)
        self.meet("actor", "join_transfer_group", "join_transfer_group")

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",))
    def load_broadcast(self, metadata: Any, version: int, bucket: int, of: int) -> None:
        self.write("load_broadcast", metadata=metadata, version=version, bucket=bucket, of=of)
        self.meet("actor", "broadcast_weights", "load_broadcast")
