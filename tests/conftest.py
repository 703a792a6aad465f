"""Fixtures for all tests: one Ray per pytest process, and clusters on either backend that close after their test."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest

from flowrl import Cluster, Placement

BackendName = Literal["inline", "ray"]
NUM_CPUS = 16
"""Number of logical CPUs of the test Ray, which bounds its worker processes; independent of the machine."""

ClusterMaker = Callable[..., Cluster]


SLOWEST_FILES = (
    "recipes/test_quickstart.py",
    "recipes/test_rewards.py",
    "recipes/test_numbers.py",
    "recipes/test_schedules.py",
    "rewards/processes/test_pool.py",
    "engines/parallel/test_strategies.py",
    "controller/calls/test_idle_callbacks.py",
    "report/viewer/test_viewer_app.py",
    "engines/rollout/hf/test_turn_cache.py",
    "recipes/test_environments.py",
    "data/reading/test_generated_rows.py",
    "engines/models/test_sharded_loading.py",
    "controller/calls/test_failures.py",
    "controller/host/test_fork_server.py",
    "recipes/test_resume.py",
    "rewards/sandbox/test_escapes.py",
    "run/test_loop.py",
    "run/test_check.py",
    "controller/test_errors.py",
    "environments/test_environment_host.py",
    "controller/test_oracle.py",
    "recipes/test_every_algorithm.py",
    "rewards/test_service.py",
    "controller/test_peers_defects.py",
    "cli/test_inference_commands.py",
    "recipes/test_distillation.py",
    "inference/test_generation_job.py",
    "recipes/test_bad_input.py",
    "engines/checkpoint/test_export.py",
    "schedules/test_streaming_rollouts.py",
    "recipes/test_vllm.py",
    "recipes/test_pipeline.py",
    "engines/rollout/hf/test_engine.py",
    "run/test_datasets.py",
    "run/test_restarts.py",
    "recipes/test_bad_checkpoints.py",
    "controller/calls/test_calls.py",
    "recipes/test_sft.py",
    "recipes/test_rollout_checks.py",
    "checkpoints/test_saver.py",
    "run/test_loop_outputs.py",
    # long only with slow tests
    "recipes/test_programs.py",
    "engines/models/test_families.py",
    "recipes/test_endings.py",
    "controller/backends/test_ray_nodes.py",
    "engines/rollout/vllm/test_vllm_tp.py",
    "run/test_doctor.py",
    "controller/calls/test_resend.py",
    "engines/rollout/vllm/test_quantization.py",
    "controller/backends/test_address.py",
    "engines/rollout/vllm/test_engine.py",
    "recipes/test_multinode.py",
    "test_run_gpu.py",
    "controller/test_cluster_restart.py",
    "controller/test_replica.py",
    "engines/rollout/vllm/test_vllm_sources.py",
    "inference/test_vllm_commands.py",
)
"""Test files that take longest, in descending order of the time of their default tests. They start first, so that the
workers end together.
"""


def pytest_configure() -> None:
    """Restores the default SIGINT handler, and removes hypothesis' time limit, which depends on the machine's speed.

    A shell disables the handler for background jobs, and child processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if find_spec("hypothesis") is None:  # a GPU host may lack it, and the tests marked gpu do not use it
        return
    import hypothesis  # noqa: PLC0415 (see above)

    hypothesis.settings.register_profile("flowrl", deadline=None)
    hypothesis.settings.load_profile("flowrl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the slowest files to the front; xdist assigns files to workers in this order."""
    folder = Path(__file__).parent
    rank = {name: index for index, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(folder).as_posix(), len(rank)))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Starts a Ray on the loopback interface. Clusters join it and leave it running when they close."""
    # A session that starts no Ray does not import it.
    from flowrl.controller.backends.local_ray import RAY_SETTINGS, LocalRay  # noqa: PLC0415
    from flowrl.controller.host.fork_server import fork_server  # noqa: PLC0415

    os.environ |= RAY_SETTINGS
    fork_server(("flowrl.run.advantages", "flowrl.workers"))  # one server with the imports of all tests
    local_ray = LocalRay(NUM_CPUS, object_store_memory=512 * 1024**2)
    yield
    local_ray.stop()


@pytest.fixture(params=["inline", "ray"], scope="session")
def backend(request: pytest.FixtureRequest) -> BackendName:
    """Parametrizes a test over both backends; starts Ray on first use."""
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


@pytest.fixture
def open_cluster() -> Iterator[ClusterMaker]:
    """Opens CPU clusters that close after the test: `open_cluster("inline", {"main": [2]}, {"actor": "main"})`."""
    with ExitStack() as stack:

        def make(backend: BackendName, pools: dict[str, Any], roles: dict[str, Any], **settings: Any) -> Cluster:
            placement = Placement(device="cpu", pools=pools, roles=roles)
            return stack.enter_context(Cluster(placement, backend=backend, **settings))

        yield make
