"""A long run frees the objects of completed steps, and retains only selected rows of older batches."""

import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import ray
from ray._private.internal_api import node_stats  # Ray 2.60 has no public API for the bytes in its store

from flowrl import Batch
from tests.controller.conftest import Shared

MIB = 1024**2
WIDTH = 1024
"""Float32 values per row: 4 KiB, so that every shard is an object of the store."""


def store_bytes() -> int:
    """Returns the bytes in the object store of this machine."""
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return stats.store_stats.object_store_bytes_used


def wait_for_at_most(measure: Callable[[], int], at_most: int) -> int:
    """Waits until a measure is small enough, because other processes release references asynchronously."""
    deadline = time.monotonic() + 60
    while measure() > at_most and time.monotonic() < deadline:
        time.sleep(0.05)
    return measure()


def only_ray(shared: Shared) -> None:
    if shared.backend == "inline":
        pytest.skip("one process has no object store")


def wide_rows(count: int, first: int = 0) -> Batch:
    """Returns rows numbered from `first`, each with 4 KiB of its number."""
    x = np.arange(first, first + count)
    wide = np.broadcast_to(x[:, None], (count, WIDTH)).astype(np.float32)
    return Batch.from_columns({"x": x, "wide": wide, "text": [f"t{i}" for i in x]}, {"ids": x.repeat(2)}, [2] * count)


def run_steps(shared: Shared, steps: int) -> None:
    """Runs steps that each send 4 MiB between groups and retain a third result in the batch."""
    for step in range(steps):
        batch = shared.first.echo(wide_rows(1000, first=step))
        batch["y"] = shared.second.echo(batch)["wide"]
        batch["y2"] = shared.first.scaled(batch.reorder(np.arange(1000)[::-1]))["y"]
        assert batch.select("x").rows([0]).get("x").tolist() == [step]
        shared.cluster.wait_for_calls()


@pytest.mark.slow
def test_the_object_store_does_not_grow_with_the_number_of_steps(shared: Shared):
    only_ray(shared)
    run_steps(shared, 20)
    stored, resident = wait_for_at_most(store_bytes, 2 * MIB), psutil.Process().memory_full_info().uss
    run_steps(shared, 200)
    assert wait_for_at_most(store_bytes, stored + 1 * MIB) <= stored + 1 * MIB
    assert psutil.Process().memory_full_info().uss - resident < 8 * MIB
