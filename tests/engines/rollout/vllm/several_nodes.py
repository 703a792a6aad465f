"""A vLLM replica on two nodes of a Ray cluster, as a part of placement_driver.py."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flowrl import Cluster, Placement
from flowrl.config import ModelConfig, RolloutConfig
from flowrl.config.placement import RolePlacement
from flowrl.workers import Rollout
from tests.engines.rollout.vllm.test_engine import PROMPTS, RESPONSE, Pair
from tests.engines.rollout.vllm.test_vllm_tp import all_end, save


@contextmanager
def open_pair(address: str, folder: Path) -> Iterator[Pair]:
    """Opens a replica with a stage on each of two nodes."""
    model = save(folder)
    config = RolloutConfig(engine="vllm", max_response_tokens=RESPONSE)
    placement = Placement(device="cpu", pools={"main": [1, 1]}, roles={"rollout": RolePlacement(pool="main", pp=2)})
    with Cluster(placement, address=address, dedicated=("rollout",), num_threads=2) as cluster:
        yield Pair(cluster.group("rollout", Rollout, config, ModelConfig(path=folder), seed=0), model)


def find_workers() -> dict[str, list[psutil.Process]]:
    """Returns the worker processes of vLLM on this machine, by the address of their node."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment, command = process.info["environ"] or {}, " ".join(process.info["cmdline"] or ())
        if "VLLM_HOST_IP" in environment and "Worker" in command:
            found.setdefault(environment["VLLM_HOST_IP"], []).append(process)
    return dict(sorted(found.items()))


def errors_of(pair: Pair) -> list[float]:
    """Returns the relative errors of log-probabilities before and after two updates."""
    errors = []
    for seed in range(3):
        if seed:
            pair.sync(seed)
        errors += [pair.relative_error(PROMPTS, pair.generate(PROMPTS, greedy=greedy)) for greedy in (False, True)]
    return errors


def results(address: str) -> dict[str, Any]:
    """Returns errors of the replica's log-probabilities, the number of its workers on each node, and what happens if
    a worker of the second node is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        with open_pair(address, Path(folder) / "whole") as pair:
            found: dict[str, Any] = {"errors": errors_of(pair)}
            workers = find_workers()
            found["workers"] = {host: len(processes) for host, processes in workers.items()}
            first, last = (process for processes in workers.values() for process in processes)
            last.send_signal(signal.SIGKILL)  # the follower's, because the leader is on the first node
            found["all end"] = all_end([first, last])
            found["replaced"] = pair.relative_error(PROMPTS, pair.generate(PROMPTS))
            remaining = [process for processes in find_workers().values() for process in processes]
        found["none outlives the cluster"] = all_end(remaining)
        return found
