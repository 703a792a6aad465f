"""One cluster per backend, shared by all tests whose calls succeed, because starting processes is slow."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from flowrl import Batch, Cluster, Placement, WorkerGroup
from tests.conftest import BackendName, make_backend
from tests.controller.workers import Arithmetic, Summing

PLACEMENT = Placement.model_validate(
    {
        "device": "cpu",
        "pools": {"three": [3], "two": [2]},
        "roles": {
            "first": "three",
            "guest": "three",
            "second": "two",
            "tensor": {"pool": "two", "tp": 2},
            "pipeline": {"pool": "two", "pp": 2},
            "sum_a": "three",
            "sum_b": "three",
            "sum_two": "two",
        },
    }
)


@pytest.fixture(params=["inline", "faulty", "ray"], scope="session")
def backend(request: pytest.FixtureRequest) -> BackendName:
    """Parametrizes a test over all backends; starts Ray on first use."""
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


@dataclass
class Shared:
    """Groups of two pools of three and two processes. No test may let a call fail in a worker here."""

    backend: BackendName
    cluster: Cluster
    first: WorkerGroup
    guest: WorkerGroup
    second: WorkerGroup
    tensor: WorkerGroup
    pipeline: WorkerGroup
    sums: dict[str, WorkerGroup]


@pytest.fixture(scope="session")
def shared(backend: BackendName) -> Iterator[Shared]:
    with Cluster(PLACEMENT, backend=make_backend(backend), num_threads=1) as cluster:
        sums = {
            role: cluster.group(role, Summing, factor) for role, factor in (("sum_a", 1), ("sum_b", 10), ("sum_two", 1))
        }
        arithmetic = {"first": 2, "guest": 7, "second": 5, "tensor": 3, "pipeline": 3}
        groups = {role: cluster.group(role, Arithmetic, factor=factor) for role, factor in arithmetic.items()}
        yield Shared(backend, cluster, **groups, sums=sums)


@pytest.fixture
def batch() -> Batch:
    """Seven rows: too many for three ranks to share evenly."""
    return Batch.from_columns(
        rows={"x": list(range(7)), "text": [f"t{i}" for i in range(7)]},
        tokens={"ids": list(range(28))},
        lengths=[1, 2, 3, 4, 5, 6, 7],
    )
