"""Metrics of the devices in a step: throughput, memory, switches between roles, and weight syncs. Pure functions."""

from collections import defaultdict
from collections.abc import Iterable

from flowrl.data.events import CallEvent
from flowrl.report.trace import busy_ns

PREFIX = "usage/"
"""Prefix of the names of usage metrics (docs/metrics.md)."""


def usage_metrics(events: Iterable[CallEvent], peak_tflops: float | None = None) -> dict[str, float]:
    """Returns the metrics of the calls of a step, as `usage/ROLE/NAME`.

    `peak_tflops` is the setting `report.peak_tflops`. None uses the known peaks of devices.
    """
    roles: defaultdict[str, list[CallEvent]] = defaultdict(list)
    for event in events:
        if event.usage:
            roles[event.role].append(event)
    calls = [event for role in roles.values() for event in role]
    metrics = {f"{role}/{name}": value for role in sorted(roles) for name, value in _work(roles[role]).items()}
    metrics |= {f"{role}/mfu": mfu for role in roles if (mfu := _mfu(roles[role], peak_tflops)) is not None}
    metrics |= _switches(calls)
    metrics |= {f"weight_sync/{name}": value for name, value in _weight_sync(calls).items()}
    return {PREFIX + name: value for name, value in metrics.items()}


def _work(events: list[CallEvent]) -> dict[str, float]:
    """Returns the throughput and the memory of a role per device."""
    values: dict[str, float] = {}
    for name, metric, scale in (("tokens", "tokens_per_s", 1.0), ("flops", "tflops", 1e12)):
        seconds = sum(_work_s(event) for event in events if name in event.usage)
        if seconds > 0:
            values[metric] = sum(event.usage.get(name, 0.0) for event in events) / seconds / scale
    for name, metric, reduce, scale in (
        ("allocated", "allocated_gb", max, 1e9),
        ("reserved", "reserved_gb", max, 1e9),
        ("free", "free_gb", min, 1e9),
        ("memory_fraction", "memory_fraction", max, 1.0),
    ):
        if own := [event.usage[name] for event in events if name in event.usage]:
            values[metric] = reduce(own) / scale
    num_responses = sum(event.usage.get("responses", 0) for event in events)
    if num_responses and any("preemptions" in event.usage for event in events):
        values["preemptions"] = sum(event.usage.get("preemptions", 0) for event in events) / num_responses
    return values


def _work_s(event: CallEvent) -> float:
    """Returns the duration of a call without the switch of roles before it."""
    return event.duration_s - sum(value for name, value in event.usage.items() if name.startswith("seconds/"))


def _mfu(events: list[CallEvent], peak_tflops: float | None) -> float | None:
    """Returns the model FLOPs of a role as a fraction of the FLOPs that its devices could compute in the same time.
    Returns None if a peak is unknown.
    """
    counted = [event for event in events if "flops" in event.usage]
    peaks = [event.usage.get("peak_flops", 0.0) if peak_tflops is None else peak_tflops * 1e12 for event in counted]
    possible = sum(_work_s(event) * peak for event, peak in zip(counted, peaks, strict=True))
    return sum(event.usage["flops"] for event in counted) / possible if all(peaks) and possible > 0 else None


def _switches(events: list[CallEvent]) -> dict[str, float]:
    """Returns the seconds of each phase of switches between roles, on the device where the phase took longest."""
    seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        for name, value in event.usage.items():
            if name.startswith("seconds/"):
                seconds[f"{name.removeprefix('seconds/')}_s"][event.device_label] += value
    return {name: max(devices.values()) for name, devices in sorted(seconds.items())}


def _weight_sync(events: list[CallEvent]) -> dict[str, float]:
    """Returns the size of the weights that one receiver loads, and the time in which a call exports or loads them."""
    moving = [event for event in events if event.usage.get("weight_bytes")]
    sizes: defaultdict[str, float] = defaultdict(float)
    for event in moving:
        if event.rank == 0:
            sizes[event.role] += event.usage["weight_bytes"]
    if not sizes:
        return {}
    first, last = min(event.started_ns for event in moving), max(event.ended_ns for event in moving)
    gigabytes, seconds = max(sizes.values()) / 1e9, busy_ns(moving, first, last) / 1e9
    return {"gb": gigabytes, "seconds": seconds} | ({"gb_per_s": gigabytes / seconds} if seconds else {})
