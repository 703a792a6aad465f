"""The second process on a GPU. It measures used memory and receives weights, and imports neither flowrl's engines nor
transformers.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch import multiprocessing as mp

from flowrl.engines.rollout.cuda_ipc import IpcBucket, read_bucket

_TIMEOUT_S = 60


class Observer:
    """Handle of the second process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def used_bytes(self) -> int:
        """Returns the memory of the GPU that all processes use together. 0 on a CPU."""
        return self._request(None)

    def find_changed(self, bucket: IpcBucket, version: int) -> list[str]:
        """Reads a bucket. Returns the names of the weights that are not exactly those of `version`."""
        return self._request((bucket, version))

    def _request(self, message):
        self._connection.send(message)
        if not self._connection.poll(_TIMEOUT_S):
            raise TimeoutError(f"the observing process has not responded within {_TIMEOUT_S} s")
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("the observing process has ended; its error is above") from None


@contextmanager
def start_observer(device: torch.device) -> Iterator[Observer]:
    """Starts the second process and ends it after the block."""
    context = mp.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=_observe, args=(other, str(device)), daemon=True)
    process.start()
    other.close()  # otherwise a read would not end if the process has died
    try:
        yield Observer(own)
    finally:
        own.close()
        process.join(_TIMEOUT_S)
        if process.is_alive():
            process.kill()


def draw_weight(name: str, version: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a random weight. On one device, its bits depend only on the other arguments."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{name}/{version}".encode()))
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def _observe(connection: Connection, device_name: str) -> None:
    device = torch.device(device_name)
    with connection:
        while True:
            try:
                message = connection.recv()
            except EOFError:
                return
            if message is None:
                connection.send(_used_bytes(device))
            else:
                bucket, version = message
                connection.send(_find_changed(bucket, version, device))


def _used_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _find_changed(bucket: IpcBucket, version: int, device: torch.device) -> list[str]:
    weights = read_bucket(bucket, device)
    return [
        name
        for name, weight in weights
        if not torch.equal(weight, draw_weight(name, version, tuple(weight.shape), weight.dtype, device))
    ]
