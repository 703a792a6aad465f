"""What every test folder shares: one Ray for the session, and clusters on either backend that end with their test."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from flowrl import Cluster, Placement

BackendName = Literal["inline", "ray"]
NUM_CPUS = 16
"""Logical: worker processes that Ray will hold at a time, whatever the machine has."""

ClusterMaker = Callable[..., Cluster]


def pytest_configure() -> None:
    """A shell starts what it puts into the background with SIGINT ignored, and every program that a test starts would
    inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray on the loopback interface. Clusters that find it use it, and leave it running when they close."""
    import ray  # noqa: PLC0415 (a session that starts no Ray does not pay for its import)

    from flowrl.controller.backends.ray_nodes import RAY_SETTINGS  # noqa: PLC0415

    os.environ |= RAY_SETTINGS
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=512 * 1024**2,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(params=["inline", "ray"], scope="session")
def backend(request: pytest.FixtureRequest) -> BackendName:
    """Either backend; Ray is started when a test first needs it."""
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


@pytest.fixture
def open_cluster() -> Iterator[ClusterMaker]:
    """Makes CPU clusters, closed after the test: `open_cluster("inline", {"main": [2]}, {"actor": "main"})`."""
    with ExitStack() as stack:

        def make(backend: BackendName, pools: dict[str, Any], roles: dict[str, Any], **settings: Any) -> Cluster:
            placement = Placement(device="cpu", pools=pools, roles=roles)
            return stack.enter_context(Cluster(placement, backend=backend, **settings))

        yield make
