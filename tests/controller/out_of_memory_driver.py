"""A driver whose worker allocates memory until Ray kills it."""

import sys
import time

import numpy as np

from flowrl import Cluster, Dispatch, Placement, Worker, register
from flowrl.controller.errors import ProcessLost


class Allocating(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def allocate(self) -> int:
        """Allocates 12 GiB in steps of 128 MiB."""
        arrays = []
        for _ in range(96):
            arrays.append(np.ones(2**24))
            time.sleep(0.1)
        return len(arrays)


def main() -> None:
    # The class as other processes import it, not that of __main__.
    from tests.controller.out_of_memory_driver import Allocating  # noqa: PLC0415

    with Cluster(Placement(device="cpu", pools={"main": [1]}, roles={"actor": "main"})) as cluster:
        try:
            cluster.group("actor", Allocating).allocate().get()
        except ProcessLost as error:
            sys.stdout.write(
                f"{error.role} {error.method} {error.rank} {'out of memory' * ('out of memory' in error.cause)}\n"
            )


if __name__ == "__main__":
    main()
