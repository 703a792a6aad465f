"""Joining a Ray cluster that somebody else started."""

import subprocess
import sys

import pytest
import ray

from flowrl import Cluster, Placement
from flowrl.controller.errors import BackendError


def test_a_driver_joins_a_cluster_by_its_address_and_leaves_it_running(ray_session: None) -> None:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.controller.joining", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, weights = done.stdout.splitlines()
    assert "placement.pools.main is [2], more devices than there are" in refused
    assert weights == "[7, 11, 9]"
    assert ray.get(ray.put(1)) == 1


def test_an_address_where_nothing_answers_is_refused() -> None:
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"actor": "main"})
    with pytest.raises(BackendError, match=r"address is 127\.0\.0\.1:1, where no Ray cluster answers"):
        Cluster(placement, address="127.0.0.1:1")
