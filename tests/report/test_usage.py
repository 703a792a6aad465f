"""Metrics of the devices, by hand."""

from dataclasses import replace

import pytest

from flowrl.data.events import CallEvent
from flowrl.report.usage import usage_metrics
from tests.report.call_events import call

SECOND = 10**9


def used(
    role: str, start_s: float, end_s: float, *, rank: int = 0, device: str = "cuda:0", **usage: float
) -> CallEvent:
    return replace(
        call(role, int(start_s * SECOND), int(end_s * SECOND), rank=rank, device=device),
        usage={name.replace("__", "/"): value for name, value in usage.items()},
    )


def test_throughput_is_per_device_and_excludes_switches() -> None:
    """Two devices work 2 s and 3 s. Before its work, the second one loads the role for 1 s."""
    events = [
        used("actor", 0, 2, flops=600e12, tokens=1000, peak_flops=1000e12),
        used(
            "actor",
            0,
            4,
            rank=1,
            device="cuda:1",
            flops=400e12,
            tokens=1500,
            peak_flops=1000e12,
            seconds__actor__onload=1,
        ),
    ]
    metrics = usage_metrics(events)
    assert metrics["usage/actor/tflops"] == pytest.approx(1000 / 5)
    assert metrics["usage/actor/tokens_per_s"] == pytest.approx(2500 / 5)
    assert metrics["usage/actor/mfu"] == pytest.approx(0.2)
    assert usage_metrics(events, peak_tflops=500)["usage/actor/mfu"] == pytest.approx(0.4)


def test_a_device_without_a_known_peak_has_no_mfu() -> None:
    events = [used("actor", 0, 2, flops=600e12, peak_flops=1000e12), used("actor", 2, 4, flops=600e12)]
    assert "usage/actor/mfu" not in usage_metrics(events)
    assert usage_metrics(events, peak_tflops=600)["usage/actor/mfu"] == pytest.approx(0.5)


def test_calls_that_generate_without_a_complete_response_count_for_the_throughput() -> None:
    events = [used("rollout", 0, 3, tokens=0), used("rollout", 3, 4, tokens=100, responses=4, preemptions=1)]
    metrics = usage_metrics(events)
    assert metrics["usage/rollout/tokens_per_s"] == pytest.approx(25)
    assert metrics["usage/rollout/preemptions"] == pytest.approx(0.25)


def test_memory_is_that_of_the_fullest_device() -> None:
    events = [
        used("actor", 0, 1, allocated=3e9, reserved=5e9, free=70e9, memory_fraction=0.1),
        used("actor", 0, 1, rank=1, allocated=4e9, reserved=4e9, free=60e9, memory_fraction=0.3),
        used("critic", 0, 1, allocated=1e9, reserved=1e9, free=50e9),
    ]
    assert usage_metrics(events) == {
        **{f"usage/actor/{name}": value for name, value in (("allocated_gb", 4.0), ("reserved_gb", 5.0))},
        **{f"usage/actor/{name}": value for name, value in (("free_gb", 60.0), ("memory_fraction", 0.3))},
        **{f"usage/critic/{name}_gb": value for name, value in (("allocated", 1.0), ("reserved", 1.0), ("free", 50.0))},
    }


def test_a_phase_has_the_duration_on_the_slowest_device() -> None:
    events = [
        used("rollout", 0, 4, seconds__rollout__onload_weights=1.0, seconds__actor__offload=0.5),
        used("rollout", 4, 8, seconds__rollout__onload_weights=2.0),
        used("rollout", 0, 4, rank=1, device="cuda:1", seconds__rollout__onload_weights=2.5),
    ]
    assert usage_metrics(events) == {"usage/actor/offload_s": 0.5, "usage/rollout/onload_weights_s": 3.0}


def test_the_speed_of_a_weight_sync_excludes_the_time_between_its_calls() -> None:
    """Two buckets of 3 GB. The second export overlaps the first load. Rank 1 loads the same buckets."""
    events = [
        *(used("actor", 0, 2, weight_bytes=3e9), used("actor", 2, 4, weight_bytes=3e9)),
        *(used("rollout", 2, 3, weight_bytes=3e9), used("rollout", 9, 11, weight_bytes=3e9)),
        *(used("rollout", 2, 5, rank=1, weight_bytes=3e9), used("rollout", 9, 10, rank=1, weight_bytes=3e9)),
    ]
    values = {"gb": 6.0, "seconds": 7.0, "gb_per_s": pytest.approx(6 / 7)}
    assert usage_metrics(events) == {f"usage/weight_sync/{name}": value for name, value in values.items()}
