"""Waits until a Ray cluster has a given number of nodes. Arguments: `ADDRESS NUM_NODES`."""

import sys
import time

from flowrl.cli import exit_code
from flowrl.config import UserError
from flowrl.controller.backends.ray_nodes import RayNodes

_TIMEOUT_S = 120.0


def await_nodes(address: str, num_nodes: int) -> None:
    """Waits until the cluster at `address` has `num_nodes` nodes. Raises UserError after two minutes."""
    nodes, deadline = RayNodes(address), time.monotonic() + _TIMEOUT_S
    try:
        while (num_joined := len(nodes.inventory("cpu", None).nodes)) < num_nodes:
            if time.monotonic() > deadline:
                raise UserError(
                    f"only {num_joined} of {num_nodes} Ray nodes joined {address} within {_TIMEOUT_S:.0f} s: "
                    f"check that the hosts can reach each other on all ports"
                )
            time.sleep(0.5)
            nodes.connect(0)
    finally:
        nodes.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: await_nodes(sys.argv[1], int(sys.argv[2]))))
