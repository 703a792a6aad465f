"""Interleaved measurement of two alternatives, the options of all benchmarks, and a description of the machine."""

import argparse
import json
import os
import platform
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Required, TypedDict, TypeVar

import psutil

WARMUP = 3
MIB = 1024**2
_RECEIVED_AT = 128
"""Offset of tcpi_bytes_received in Linux's tcp_info."""


class Figure(TypedDict, total=False):
    """One row of the table. `bound` limits the ratio, or `ours`."""

    what: Required[str]
    unit: Required[str]
    ours: Required[float]
    raw: float
    ratio: float
    bound: float


def paired(
    what: str,
    ours: Callable[[], object],
    raw: Callable[[], object],
    repeats: int,
    bound: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Figure:
    """Measures both in turn and returns medians in milliseconds, with the median of the ratios of pairs."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + WARMUP):
        # The sides alternate, because each one affects the state for the next one.
        for side in (0, 1) if number % 2 else (1, 0):
            start_s = clock()
            (ours, raw)[side]()
            if number >= WARMUP:
                times[side].append((clock() - start_s) * 1e3)
    mine, theirs = map(statistics.median, times)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    figure = Figure(what=what, unit="ms", ours=round(mine, 2), raw=round(theirs, 2), ratio=round(ratio, 2))
    return _bounded(figure, bound)


def read_arguments(parser: argparse.ArgumentParser, **smoke: object) -> argparse.Namespace:
    """Adds the option `--smoke` and returns the arguments of the command line.

    With `--smoke`, a benchmark measures its smallest case once, as a test of the benchmark. `smoke` contains the
    defaults of the other options for this case.
    """
    parser.add_argument("--smoke", action="store_true", help="measure the smallest case once, to test the benchmark")
    if "--smoke" in sys.argv[1:]:
        parser.set_defaults(**smoke)
    return parser.parse_args()


def alone(what: str, unit: str, value: float, bound: float | None = None) -> Figure:
    """Returns a figure without a baseline."""
    return _bounded(Figure(what=what, unit=unit, ours=round(value, 3)), bound)


def _bounded(figure: Figure, bound: float | None) -> Figure:
    if bound is not None:
        figure["bound"] = bound
    return figure


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Returns the median milliseconds of a call."""
    times = []
    for number in range(repeats + WARMUP):
        start_s = time.perf_counter()
        call()
        if number >= WARMUP:
            times.append((time.perf_counter() - start_s) * 1e3)
    return statistics.median(times)


def received_bytes() -> dict[str, int]:
    """Returns the bytes received by each TCP socket of this process, as counted by the kernel."""
    counts = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = entry.readlink().name
            if not target.startswith("socket:"):
                continue
            with socket.socket(fileno=socket.dup(int(entry.name))) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    counts[target] = struct.unpack_from("Q", info, _RECEIVED_AT)[0]
        except OSError:
            continue  # a descriptor that was closed meanwhile
    return counts


def peak_growth(call: Callable[[], object]) -> int:
    """Returns the growth of this process's peak resident memory during a call (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = psutil.Process().memory_info().rss
    call()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) - before


def machine() -> dict[str, str]:
    """Returns a description of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    packages = {name: version(name) for name in ("ray", "torch", "numpy", "tensordict")}
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "memory": f"{psutil.virtual_memory().total / 1024**3:.0f} GiB",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    } | packages


Line = TypeVar("Line", bound=Any)  # Any: a dataclass, for which typing has no public name


def print_lines(
    lines: Iterable[Line], ran_on: dict[str, str], head: str, row_of: Callable[[Line], str], *, is_table: bool
) -> None:
    """Prints the figures of a benchmark: as a Markdown table, row by row while it measures, or as JSON at the end."""
    if not is_table:
        sys.stdout.write(json.dumps({"machine": ran_on, "figures": [asdict(line) for line in lines]}) + "\n")
        return
    sys.stdout.write(head)
    for line in lines:
        sys.stdout.write(row_of(line))
        sys.stdout.flush()


def table(figures: list[Figure]) -> str:
    """Returns the figures as a Markdown table."""
    lines = ["| what | ours | raw Ray | ratio | bound |", "|---|---|---|---|---|"]
    for figure in figures:
        unit = figure["unit"]
        raw = f"{figure['raw']:g} {unit}" if "raw" in figure else ""
        ratio = f"{figure['ratio']:g}" if "ratio" in figure else ""
        limit = f"{figure['bound']:g}" if "bound" in figure else ""
        bound = limit if "ratio" in figure or not limit else f"{limit} {unit}"
        lines.append(f"| {figure['what']} | {figure['ours']:g} {unit} | {raw} | {ratio} | {bound} |")
    return "\n".join(lines)
