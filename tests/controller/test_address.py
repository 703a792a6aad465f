"""Joining a Ray cluster that somebody else started."""

import subprocess
import sys

import ray


def test_a_driver_joins_a_cluster_by_its_address_and_leaves_it_running(ray_session: None) -> None:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.controller.joining", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, weights = done.stdout.splitlines()
    assert "placement.pools.main is [2], more devices than there are" in refused
    assert weights == "[7, 11, 9]"
    assert ray.get(ray.put(1)) == 1
