"""Seconds until the processes of a pool return their first result, and CPU time per process.

`python -m tests.benchmarks.hosts` prints the table of docs/benchmarks.md. It compares processes that the fork server
starts with processes that Python starts.
"""

import argparse
import logging
import os
import statistics
import time

import ray
from rich.console import Console
from rich.table import Table

from flowrl import Cluster, Dispatch, Placement, Worker, register
from flowrl.controller.backends.local_ray import RAY_SETTINGS
from flowrl.controller.host.fork_server import fork_server
from tests.benchmarks.measure import read_arguments

SIZES = (1, 2, 4, 8)


class Importing(Worker):
    """Imports the modules of the included roles."""

    def __init__(self) -> None:
        import flowrl.workers  # noqa: F401, PLC0415 (the measured import)

    @register(Dispatch.ONE_TO_ALL)
    def processor_seconds(self) -> float:
        """Returns the CPU seconds of this process since its start, including imports."""
        return time.process_time()


def start(ranks: int) -> tuple[float, float]:
    """Returns the seconds until all ranks have responded, and their mean CPU seconds."""
    placement = Placement(device="cpu", pools={"main": [ranks]}, roles={"worker": "main"})
    began = time.monotonic()
    with Cluster(placement, backend="ray", num_threads=1, prepare=("flowrl.workers",)) as cluster:
        used = cluster.group("worker", Importing).processor_seconds()
        return time.monotonic() - began, statistics.mean(used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of processes")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = read_arguments(parser, repeats=1, sizes=[1])
    os.environ |= RAY_SETTINGS
    ray.init(
        address="local",
        num_cpus=max(arguments.sizes),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    table = Table("processes", "started by", "seconds", "CPU seconds per process")
    for kind in ("forked", "Python"):
        start(1)  # starts the fork server, and fills the file cache
        for ranks in arguments.sizes:
            starts = [start(ranks) for _ in range(arguments.repeats)]
            wall, used = (statistics.median(values) for values in zip(*starts, strict=True))
            table.add_row(str(ranks), kind, f"{wall:.2f}", f"{used:.2f}")
        fork_server().end()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
