"""A process that receives weights through shared device memory, as the process of a rollout does."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from flowrl.engines.rollout.cuda_ipc import IpcBucket, read_bucket


class Receiver:
    """Reads buckets in another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(self, bucket: IpcBucket) -> list[tuple[str, torch.Tensor]]:
        """Returns the weights that the other process has read, on the CPU."""
        self._connection.send(bucket)
        return self._connection.recv()


@contextmanager
def start_receiver(device: torch.device) -> Iterator[Receiver]:
    context: Any = torch.multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=_read_buckets, args=(other, device), daemon=True)
    process.start()
    other.close()
    try:
        yield Receiver(own)
    finally:
        own.send(None)
        process.join(60)
        assert process.exitcode == 0


def _read_buckets(connection: Connection, device: torch.device) -> None:
    while (bucket := connection.recv()) is not None:
        connection.send([(name, weight.cpu()) for name, weight in read_bucket(bucket, device)])
        del bucket
