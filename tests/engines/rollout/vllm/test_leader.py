"""Start of a replica on several nodes, without a model. tests/controller/backends/test_ray_nodes.py runs one."""

import importlib.util
import multiprocessing
import signal
import time
from collections.abc import Callable

import pytest

from flowrl.engines.rollout.base import RolloutError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,  # the import of vLLM
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]


def test_the_error_of_a_follower_ends_the_workers_that_wait_for_it() -> None:
    from flowrl.engines.rollout.vllm.engine import EngineArgs  # noqa: PLC0415 (vLLM is optional)
    from flowrl.engines.rollout.vllm.leader import Followers  # noqa: PLC0415

    started: list[int] = []

    def run(args: EngineArgs, variables: dict[str, str]) -> Callable[[], object]:
        started.append(args.node_rank)

        def wait() -> object:
            raise RolloutError(f"no GPU on node {args.node_rank}")

        return wait

    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    worker.start()
    followers = Followers(EngineArgs(model="model", nnodes=3), [run, run])
    worker.join(60)
    followers.end_start([])
    assert (started, worker.exitcode) == ([1, 2], -signal.SIGKILL)
    assert isinstance(followers.error, RolloutError)
