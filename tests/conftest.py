"""Fixtures for all tests: one Ray per pytest process, and clusters on either backend that close after their test."""

import atexit
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest

from flowrl import Cluster, Placement
from flowrl.controller.backends.base import Backend
from tests import selection
from tests.controller.faulty_backend import FaultyBackend
from tests.costs import Costs

BackendName = Literal["inline", "faulty", "ray"]
NUM_CPUS = 16
"""Number of logical CPUs of the test Ray, which bounds its worker processes; independent of the machine."""

ClusterMaker = Callable[..., Cluster]


def pytest_configure(config: pytest.Config) -> None:
    """Registers markers and the measurement of costs, and restores the default handlers of SIGINT and SIGHUP.

    Removes hypothesis' time limit, which depends on the machine's speed.
    A shell ignores SIGINT in background jobs, and nohup ignores SIGHUP. Child processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(Costs())
    selection.add_markers(config)
    if find_spec("hypothesis") is None:  # a GPU host may lack it, and the tests marked gpu do not use it
        return
    import hypothesis  # noqa: PLC0415 (see above)

    hypothesis.settings.register_profile("flowrl", deadline=None)
    hypothesis.settings.load_profile("flowrl")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files from which `-m` selects no test, because importing them takes seconds."""
    return selection.is_ignored(collection_path, config.getoption("markexpr") or "") or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the test files without the garbage collector, which then ignores their objects in all tests.

    Almost all objects of an import remain for the whole session.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # otherwise, some libraries report their objects as leaked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the markers that `-m` selects by: the part of a slow test, and `processes`."""
    for item in items:
        selection.mark(item)


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


def make_backend(backend: BackendName | Backend) -> Literal["inline", "ray"] | Backend:
    """Returns the argument of `Cluster` for a backend in the parameters of a test."""
    return FaultyBackend() if backend == "faulty" else backend


@pytest.fixture
def default_algorithms() -> Iterator[None]:
    """Ends torch's deterministic mode after the test, and restores the environment."""
    import torch  # noqa: PLC0415 (most tests of this file's users need no torch)

    environment = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue] (torch replaces the module at import)
    os.environ.clear()
    os.environ |= environment


@pytest.fixture
def open_cluster() -> Iterator[ClusterMaker]:
    """Opens CPU clusters that close after the test: `open_cluster("inline", {"main": [2]}, {"actor": "main"})`."""
    with ExitStack() as stack:

        def make(
            backend: BackendName | Backend, pools: dict[str, Any], roles: dict[str, Any], **settings: Any
        ) -> Cluster:
            placement = Placement(device="cpu", pools=pools, roles=roles)
            return stack.enter_context(Cluster(placement, backend=make_backend(backend), **settings))

        yield make
