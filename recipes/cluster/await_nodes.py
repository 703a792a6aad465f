"""Waits until a Ray cluster has as many nodes as were started: `ADDRESS NUMBER`."""

import sys
import time

from flowrl.cli import exit_code
from flowrl.config import UserError
from flowrl.controller.backends.ray_nodes import RayNodes

_LIMIT_S = 120.0


def await_nodes(address: str, number: int) -> None:
    """Returns when the cluster at `address` has `number` nodes. Raises `UserError` after two minutes."""
    nodes, deadline = RayNodes(address), time.monotonic() + _LIMIT_S
    try:
        while (found := len(nodes.inventory("cpu", None).nodes)) < number:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Ray runs on {number} hosts, but only {found} nodes have come to {address} in {_LIMIT_S:.0f} s: "
                    f"see that the hosts reach each other on every port"
                )
            time.sleep(0.5)
            nodes.connect(0)
    finally:
        nodes.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: await_nodes(sys.argv[1], int(sys.argv[2]))))
