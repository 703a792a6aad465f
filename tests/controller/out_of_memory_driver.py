"""A driver whose worker allocates memory until Ray kills it. The argument is `stateful` or `stateless`."""

import sys
import time

import numpy as np

from flowrl import Cluster, Dispatch, Placement, Worker, register
from flowrl.controller.errors import ProcessLost


class Allocating(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def allocate(self) -> int:
        """Allocates 12 GiB in steps of 128 MiB."""
        arrays = []
        for _ in range(96):
            arrays.append(np.ones(2**24))
            time.sleep(0.1)
        return len(arrays)


class StatelessAllocating(Allocating):
    """Its process is replaced, so that Ray does not report how it ended."""

    stateless = True


def main(kind: str) -> None:
    # The classes as other processes import them, not those of __main__.
    from tests.controller.out_of_memory_driver import Allocating, StatelessAllocating  # noqa: PLC0415

    worker = {"stateful": Allocating, "stateless": StatelessAllocating}[kind]
    with Cluster(Placement(device="cpu", pools={"main": [1]}, roles={"actor": "main"})) as cluster:
        try:
            cluster.group("actor", worker).allocate().get()
        except ProcessLost as error:
            sys.stdout.write(
                f"{error.role} {error.method} {error.rank} {'out of memory' * ('out of memory' in error.cause)}\n"
            )


if __name__ == "__main__":
    main(sys.argv[1])
