"""A driver with its own Ray: prints its listening addresses as a line of JSON, and runs until its input ends."""

import json
import sys

import psutil
import ray
from ray._private.worker import get_dashboard_url

from flowrl import Cluster, Dispatch, Placement, register
from flowrl.data.folders.private_folder import private_folder
from tests.controller.workers import Summing


class Listening(Summing):
    """Reports the addresses on which its process listens."""

    @register(Dispatch.ONE_TO_ALL)
    def listens_on(self) -> list[tuple[str, int]]:
        found = psutil.Process().net_connections(kind="inet")
        return sorted((one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN)


class Alone(Listening):
    """Constructed before any process group exists."""

    collective = False


def listening_addresses() -> list[tuple[str, str]]:
    """Returns (name, address) of the processes that listen on TCP ports: this process and all its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sorted(
        {
            (process.name(), one.laddr.ip)
            for process in processes
            for one in process.net_connections(kind="inet")
            if one.status == psutil.CONN_LISTEN
        }
    )


def main() -> None:
    placement = Placement(device="cpu", pools={"main": [2]}, roles={"before": "main", "sum": "main"})
    with Cluster(placement, num_threads=1) as cluster:
        before = cluster.group("before", Alone, 1).listens_on()
        group = cluster.group("sum", Listening, 1)
        total = group.total(1).get()
        found = {
            "total": total,
            "address": ray.get_runtime_context().gcs_address,
            "dashboard": get_dashboard_url(),
            "folder": str(private_folder()),
            "before": before,
            "after": group.listens_on(),
            "listening": listening_addresses(),
        }
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
