"""Startup time of four workers until their first response, compared with Ray actors with the same imports."""

import importlib
import statistics
import time

import ray

from flowrl import Cluster, Placement
from tests.benchmarks.bench_workers import RANKS, Bench
from tests.benchmarks.measure import Figure

IMPORTS = ("torch", "tensordict", "psutil", "flowrl.data.batch.tensordicts", "flowrl.controller.host.host")
"""Modules that a worker's process imports for `Bench`."""


@ray.remote(num_cpus=1)
class Bare:
    """A Ray actor with the imports of a worker."""

    def __init__(self) -> None:
        for name in IMPORTS:
            importlib.import_module(name)

    def nothing(self) -> None:
        return None


def figures(repeats: int) -> list[Figure]:
    """Returns startup times in seconds, with a running Ray."""
    pairs = [(_ours(), _raw()) if number % 2 else (_raw(), _ours())[::-1] for number in range(repeats)]
    ours, raw = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    what = "start of 4 workers, until the first result"
    return [Figure(what=what, unit="s", ours=round(ours, 2), raw=round(raw, 2), ratio=round(ratio, 2), bound=1.3)]


def _ours() -> float:
    placement = Placement(device="cpu", pools={"p": [RANKS]}, roles={"bench": "p"})
    start_s = time.perf_counter()
    with Cluster(placement, num_threads=1) as cluster:
        cluster.group("bench", Bench).nothing()
        return time.perf_counter() - start_s


def _raw() -> float:
    start_s = time.perf_counter()
    actors: list = [Bare.remote() for _ in range(RANKS)]
    ray.get([actor.nothing.remote() for actor in actors])
    seconds = time.perf_counter() - start_s
    for actor in actors:
        ray.kill(actor)
    return seconds
