"""A driver whose worker takes memory until somebody ends it."""

import sys
import time

import numpy as np

from flowrl import Cluster, Dispatch, Placement, Worker, register
from flowrl.controller.errors import ProcessLost


class Hungry(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def eat(self) -> int:
        """128 MiB at a time, 12 GiB at most."""
        eaten = []
        for _ in range(96):
            eaten.append(np.ones(2**24))
            time.sleep(0.1)
        return len(eaten)


def main() -> None:
    # The class as other processes import it, not that of __main__.
    from tests.controller.hungry import Hungry  # noqa: PLC0415

    with Cluster(Placement(device="cpu", pools={"main": [1]}, roles={"actor": "main"})) as cluster:
        try:
            cluster.group("actor", Hungry).eat().get()
        except ProcessLost as error:
            sys.stdout.write(f"{error.role} {error.method} {error.rank} {error.cause}\n")


if __name__ == "__main__":
    main()
