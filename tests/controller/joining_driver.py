"""A driver that joins the Ray cluster at a given address and uses its free CPU slots."""

import sys

from flowrl import Batch, Cluster, Placement
from flowrl.controller.placement.plan import PlacementError
from tests.controller.chain import Chain


def main(address: str) -> None:
    placement = Placement(device="cpu", pools={"main": [2]}, roles={"actor": "main"})
    try:
        Cluster(placement, address=address, devices=(1,))
    except PlacementError as error:
        sys.stdout.write(f"{error}\n")
    with Cluster(placement, address=address, num_threads=1) as cluster:
        batch = Batch.from_columns(
            rows={"x": [1, 2, 3], "name": ["a", "b", "c"]}, tokens={"ids": [4, 5]}, lengths=[1, 1, 0]
        )
        sys.stdout.write(f"{cluster.group('actor', Chain).weigh(batch).get('weight').tolist()}\n")


if __name__ == "__main__":
    main(sys.argv[1])
