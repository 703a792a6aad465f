"""What each schedule gives on 8 to 1,024 devices, simulated: `python -m tests.benchmarks.simulate_schedules [--png F]`.

Four devices a maker, 16 prompts at once on each, lengths with a long tail, and a batch that grows with the devices: the
work of a step is the same per device everywhere, and what changes is the slowest response of a step. Sync has all
devices generate and then train; the others have devices of their own for both, split where they are fastest.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from flowrl.run.schedule import Rules
from flowrl.run.simulation import Outcome, Times, detached, in_turns, long_tailed

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
PER_MAKER, SLOTS, PROMPTS_PER_DEVICE = 4, 16, 4
GROUP_S, SIGMA, LONGEST = 60.0, 0.8, 6.0
TRAIN_S = GROUP_S / SLOTS * PER_MAKER
"""Of a prompt's samples on one device: as much as one device takes to generate them."""
UPDATE_S = 2.0
STEPS = 24

SCHEDULES: dict[str, Rules] = {
    "one_step_off": Rules(0, max_staleness=1, whole_batches=True, interrupt=False, slots=SLOTS),
    "async 1": Rules(0, max_staleness=1, slots=SLOTS),
    "async 4": Rules(0, max_staleness=4, slots=SLOTS),
    "async 1, redundant": Rules(0, max_staleness=1, slots=SLOTS),
}
"""By the staleness that they allow; the last has an eighth of a step's prompts more in flight."""
SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Point:
    devices: int
    schedule: str
    makers: int
    """Devices that generate."""
    outcome: Outcome

    @property
    def prompts_per_s(self) -> float:
        return self.outcome.steps_per_s * self.devices * PROMPTS_PER_DEVICE


def points(devices: int, steps: int) -> list[Point]:
    """Every schedule, at its best split."""
    groups = devices * PROMPTS_PER_DEVICE
    draws = long_tailed(groups * steps, GROUP_S, sigma=SIGMA, longest=LONGEST, seed=devices)
    times = Times(draws, [TRAIN_S * groups], UPDATE_S)
    sized = {"groups_per_step": groups, "total": groups * steps}
    sync = Rules(**sized, max_staleness=0, slots=SLOTS)
    found = [
        Point(devices, "sync", devices, in_turns(sync, times, makers=devices // PER_MAKER, trainer_devices=devices))
    ]
    for name, rules in SCHEDULES.items():
        redundancy = groups // 8 if "redundant" in name else 0
        rule = Rules(**{**vars(rules), **sized, "redundancy": redundancy})
        tried = [_split(devices, name, rule, times, share) for share in SHARES]
        found.append(max(tried, key=lambda point: point.prompts_per_s))
    return found


def _split(devices: int, name: str, rules: Rules, times: Times, share: float) -> Point:
    makers = max(1, int(devices * share) // PER_MAKER)
    rest = devices - makers * PER_MAKER
    return Point(devices, name, makers * PER_MAKER, detached(rules, times, makers=makers, trainer_devices=rest))


def table(found: Sequence[Point]) -> Table:
    """A line for each."""
    shown = Table(
        "devices", "schedule", "make : train", "prompts/s", "to sync", "staleness", "idle makers", "idle trainer"
    )
    for number, point in enumerate(found):
        sync = next(other for other in found if (other.devices, other.schedule) == (point.devices, "sync"))
        of = point.outcome
        split = "in turns" if point.schedule == "sync" else f"{point.makers} : {point.devices - point.makers}"
        is_last = number + 1 == len(found) or found[number + 1].devices != point.devices
        shown.add_row(
            f"{point.devices:,}",
            point.schedule,
            split,
            f"{point.prompts_per_s:.2f}",
            f"{point.prompts_per_s / sync.prompts_per_s:.2f}",
            f"{of.mean_staleness:.2f}",
            f"{of.idle_makers:.0%}",
            f"{of.idle_trainer:.0%}",
            end_section=is_last,
        )
    return shown


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
    Console(width=110).print(table(found), f"simulated in {time.perf_counter() - start_s:.0f} s")
    if arguments.png is not None:
        draw(found, arguments.png)


if __name__ == "__main__":
    main()
