"""Simulates schedules on 8 to 1,024 devices: `python -m tests.benchmarks.simulate_schedules [--png F]`.

A replica has four devices and generates eight prompts concurrently. Response lengths have a long tail. The batch grows
with the devices, so the work per device is constant; the slowest response of a step grows. `sync` is colocated on all
devices. The other schedules are detached, with the faster of two splits.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from flowrl.schedules.scheduler import ScheduleLimits
from flowrl.schedules.simulation import (
    Outcome,
    Workload,
    sample_long_tailed_s,
    simulate_colocated,
    simulate_detached,
)
from tests.benchmarks.measure import read_arguments

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
PER_REPLICA, SLOTS, PROMPTS_PER_DEVICE = 4, 8, 2
GROUP_S, SIGMA, MAX_RATIO = 60.0, 0.6, 4.0
TRAIN_S = GROUP_S / SLOTS * PER_REPLICA
"""Training seconds of a prompt's samples on one device; equal to the generation time per device."""
UPDATE_S = 2.0
STEPS = 20

SCHEDULES: dict[str, ScheduleLimits] = {
    "one_step_off": ScheduleLimits(0, max_staleness=1, is_batched=True, interrupt=False, slots=SLOTS),
    "async 1": ScheduleLimits(0, max_staleness=1, slots=SLOTS),
    "async 4": ScheduleLimits(0, max_staleness=4, slots=SLOTS),
    "async 1, over-provisioned": ScheduleLimits(0, max_staleness=1, slots=SLOTS),
}
"""Table label -> limits; the number is `max_staleness`. The last schedule is over-provisioned by 1/8 of a step."""
SHARES = (0.5, 0.75)


@dataclass(frozen=True)
class Point:
    devices: int
    schedule: str
    rollout_devices: int
    outcome: Outcome

    @property
    def split(self) -> str:
        return (
            "colocated"
            if self.schedule == "sync"
            else f"{self.rollout_devices} : {self.devices - self.rollout_devices}"
        )

    @property
    def mean_staleness(self) -> float:
        staleness = self.outcome.staleness
        return sum(age * num for age, num in staleness.items()) / sum(staleness.values())

    @property
    def prompts_per_s(self) -> float:
        return self.outcome.steps_per_s * self.devices * PROMPTS_PER_DEVICE


def points(devices: int, steps: int) -> list[Point]:
    """Simulates every schedule at its best split."""
    groups = devices * PROMPTS_PER_DEVICE
    group_s = sample_long_tailed_s(groups * steps, GROUP_S, sigma=SIGMA, max_ratio=MAX_RATIO, seed=devices)
    workload = Workload(group_s, [TRAIN_S * groups], UPDATE_S)
    sync = ScheduleLimits(groups, max_staleness=0, slots=SLOTS, total_groups=groups * steps)
    results = [
        Point(
            devices,
            "sync",
            devices,
            simulate_colocated(sync, workload, num_replicas=devices // PER_REPLICA, num_trainer_devices=devices),
        )
    ]
    for name, rules in SCHEDULES.items():
        overprovision = groups // 8 if "over-provisioned" in name else 0
        rule = replace(rules, groups_per_step=groups, total_groups=sync.total_groups, overprovision=overprovision)
        tried = [_split(devices, name, rule, workload, share) for share in SHARES]
        results.append(max(tried, key=lambda point: point.prompts_per_s))
    return results


def _split(devices: int, name: str, rules: ScheduleLimits, workload: Workload, share: float) -> Point:
    num_replicas = max(1, int(devices * share) // PER_REPLICA)
    rest = devices - num_replicas * PER_REPLICA
    return Point(
        devices,
        name,
        num_replicas * PER_REPLICA,
        simulate_detached(rules, workload, num_replicas=num_replicas, num_trainer_devices=rest),
    )


def table(results: Sequence[Point]) -> Table:
    """Returns the result table."""
    words = ("devices", "schedule", "rollout : train", "prompts/s", "vs. sync", "staleness", "dropped", "idle replicas")
    shown = Table(*words, "idle trainer")
    for number, point in enumerate(results):
        sync = next(other for other in results if (other.devices, other.schedule) == (point.devices, "sync"))
        is_last = number + 1 == len(results) or results[number + 1].devices != point.devices
        ratio = f"{point.prompts_per_s / sync.prompts_per_s:.2f}"
        start = (f"{point.devices:,}", point.schedule, point.split, f"{point.prompts_per_s:.2f}", ratio)
        shown.add_row(*start, *_measures(point), end_section=is_last)
    return shown


def _measures(point: Point) -> tuple[str, str, str, str]:
    of = point.outcome
    idle = (of.idle_replicas, of.idle_trainer)
    if point.schedule == "sync":  # the same devices generate and train
        idle = (sum(idle) - 1, sum(idle) - 1)
    admitted = sum(of.staleness.values()) + of.num_dropped
    return f"{point.mean_staleness:.2f}", f"{of.num_dropped / admitted:.1%}", f"{idle[0]:.0%}", f"{idle[1]:.0%}"


def draw(results: Sequence[Point], path: Path) -> None:
    """Draws throughput per device and mean staleness against the number of devices."""
    figure, (speed, age) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    for name in dict.fromkeys(point.schedule for point in results):
        own = [point for point in results if point.schedule == name]
        devices = [point.devices for point in own]
        speed.plot(devices, [point.prompts_per_s / point.devices * 60 for point in own], marker="o", label=name)
        age.plot(devices, [point.mean_staleness for point in own], marker="o", label=name)
    for axes, title in ((speed, "prompts per minute per device"), (age, "mean staleness (versions)")):
        axes.set(xscale="log", title=title, xlabel="devices", ylim=(0, None))
        axes.set_xticks(DEVICES, [f"{devices:,}" for devices in DEVICES], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    speed.legend(fontsize=8)
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def main() -> None:
    """Prints the table; with `--png`, also draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, help="write the plot to this file")
    parser.add_argument("--devices", type=int, nargs="*", default=DEVICES)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = read_arguments(parser, devices=DEVICES[:1], steps=2)
    start_s = time.perf_counter()
    results = [point for devices in arguments.devices for point in points(devices, arguments.steps)]
    Console(width=130).print(table(results), f"simulated in {time.perf_counter() - start_s:.0f} s")
    if arguments.png is not None:
        draw(results, arguments.png)


if __name__ == "__main__":
    main()
