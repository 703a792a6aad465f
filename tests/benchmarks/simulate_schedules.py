"""What each schedule gives on 8 to 1,024 devices, simulated: `python -m tests.benchmarks.simulate_schedules [--png F]`.

Four devices a maker, eight prompts at once on each, lengths with a long tail, a batch that grows with the devices: the
work of a step is the same per device everywhere, and what changes is the slowest response of a step. Sync has all
devices generate and then train; the others have devices of their own for both, split where they are fastest.
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

from flowrl.schedules.rules import Rules
from flowrl.schedules.simulation import Outcome, Times, detached, in_turns, long_tailed

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
PER_MAKER, SLOTS, PROMPTS_PER_DEVICE = 4, 8, 2
GROUP_S, SIGMA, LONGEST = 60.0, 0.6, 4.0
TRAIN_S = GROUP_S / SLOTS * PER_MAKER
"""Of a prompt's samples on one device: as much as one device takes to generate them."""
UPDATE_S = 2.0
STEPS = 20

SCHEDULES: dict[str, Rules] = {
    "one_step_off": Rules(0, max_staleness=1, whole_batches=True, interrupt=False, slots=SLOTS),
    "async 1": Rules(0, max_staleness=1, slots=SLOTS),
    "async 4": Rules(0, max_staleness=4, slots=SLOTS),
    "async 1, redundant": Rules(0, max_staleness=1, slots=SLOTS),
}
"""By the staleness that they allow; the last has an eighth of a step's prompts more in flight."""
SHARES = (0.5, 0.75)


@dataclass(frozen=True)
class Point:
    devices: int
    schedule: str
    makers: int
    """Devices that generate."""
    outcome: Outcome

    @property
    def split(self) -> str:
        return "in turns" if self.schedule == "sync" else f"{self.makers} : {self.devices - self.makers}"

    @property
    def prompts_per_s(self) -> float:
        return self.outcome.steps_per_s * self.devices * PROMPTS_PER_DEVICE


def points(devices: int, steps: int) -> list[Point]:
    """Every schedule, at its best split."""
    groups = devices * PROMPTS_PER_DEVICE
    draws = long_tailed(groups * steps, GROUP_S, sigma=SIGMA, longest=LONGEST, seed=devices)
    times = Times(draws, [TRAIN_S * groups], UPDATE_S)
    sync = Rules(groups, max_staleness=0, slots=SLOTS, total=groups * steps)
    found = [
        Point(devices, "sync", devices, in_turns(sync, times, makers=devices // PER_MAKER, trainer_devices=devices))
    ]
    for name, rules in SCHEDULES.items():
        overprovision = groups // 8 if "redundant" in name else 0
        rule = replace(rules, groups_per_step=groups, total=sync.total, overprovision=overprovision)
        tried = [_split(devices, name, rule, times, share) for share in SHARES]
        found.append(max(tried, key=lambda point: point.prompts_per_s))
    return found


def _split(devices: int, name: str, rules: Rules, times: Times, share: float) -> Point:
    makers = max(1, int(devices * share) // PER_MAKER)
    rest = devices - makers * PER_MAKER
    return Point(devices, name, makers * PER_MAKER, detached(rules, times, makers=makers, trainer_devices=rest))


def table(found: Sequence[Point]) -> Table:
    """A line for each."""
    words = ("devices", "schedule", "make : train", "prompts/s", "to sync", "staleness", "dropped", "idle makers")
    shown = Table(*words, "idle trainer")
    for number, point in enumerate(found):
        sync = next(other for other in found if (other.devices, other.schedule) == (point.devices, "sync"))
        is_last = number + 1 == len(found) or found[number + 1].devices != point.devices
        ratio = f"{point.prompts_per_s / sync.prompts_per_s:.2f}"
        start = (f"{point.devices:,}", point.schedule, point.split, f"{point.prompts_per_s:.2f}", ratio)
        shown.add_row(*start, *_measures(point), end_section=is_last)
    return shown


def _measures(point: Point) -> tuple[str, str, str, str]:
    of = point.outcome
    idle = (of.idle_makers, of.idle_trainer)
    if point.schedule == "sync":  # the same devices do both
        idle = (sum(idle) - 1, sum(idle) - 1)
    admitted = sum(of.staleness.values()) + of.dropped
    return f"{of.mean_staleness:.2f}", f"{of.dropped / admitted:.1%}", f"{idle[0]:.0%}", f"{idle[1]:.0%}"


def draw(found: Sequence[Point], path: Path) -> None:
    """Prompts per second and device, and how stale they are, against devices."""
    figure, (speed, age) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    for name in dict.fromkeys(point.schedule for point in found):
        own = [point for point in found if point.schedule == name]
        devices = [point.devices for point in own]
        speed.plot(devices, [point.prompts_per_s / point.devices * 60 for point in own], marker="o", label=name)
        age.plot(devices, [point.outcome.mean_staleness for point in own], marker="o", label=name)
    for axes, title in ((speed, "prompts per minute and device"), (age, "mean staleness, in updates")):
        axes.set(xscale="log", title=title, xlabel="devices", ylim=(0, None))
        axes.set_xticks(DEVICES, [f"{devices:,}" for devices in DEVICES], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    speed.legend(fontsize=8)
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def main() -> None:
    """Prints the table, and draws it where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, help="draw it too")
    parser.add_argument("--devices", type=int, nargs="*", default=DEVICES)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    start_s = time.perf_counter()
    found = [point for devices in arguments.devices for point in points(devices, arguments.steps)]
    Console(width=130).print(table(found), f"simulated in {time.perf_counter() - start_s:.0f} s")
    if arguments.png is not None:
        draw(found, arguments.png)


if __name__ == "__main__":
    main()
