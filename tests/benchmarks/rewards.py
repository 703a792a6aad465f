"""Throughput of `ScoringPool` with a reward function that sleeps 0.1 s, and the overhead per row.

python -m tests.benchmarks.rewards [--rows N] [--repeats N]
"""

import argparse
import asyncio
import statistics
import sys
import time

from flowrl.rewards.processes.pool import FunctionSpec, PoolLimits, ScoringPool
from tests.benchmarks.measure import Figure, alone, machine, read_arguments, table

SLEEP_S = 0.1
WORKERS = 16
"""Calls that run at the same time: in one process each, or as async calls in `ASYNC_PROCESSES`."""

ASYNC_PROCESSES = 2
BATCH_SIZE = 8
HERE = "tests.benchmarks.rewards"


def sleep(response: str) -> float:
    time.sleep(SLEEP_S)
    return float(len(response))


async def sleep_async(response: str) -> float:
    await asyncio.sleep(SLEEP_S)
    return float(len(response))


def sleep_batch(response: list[str]) -> list[float]:
    """Sleeps as long as calls per row."""
    time.sleep(SLEEP_S * len(response))
    return [float(len(text)) for text in response]


def no_operation(response: str) -> float:
    return float(len(response))


def seconds_of(spec: FunctionSpec, limits: PoolLimits, num_rows: int, repeats: int) -> tuple[float, float]:
    """Returns the median seconds to score all rows with running processes, and the seconds to start these."""
    times = []
    start_s = time.perf_counter()
    with ScoringPool([spec], limits) as pool:
        pool.start().wait()
        warm_up_s = time.perf_counter() - start_s
        for _ in range(repeats):
            start_s = time.perf_counter()
            futures = [pool.submit(spec.name, {"prompt": "", "response": "x" * (i % 50)}) for i in range(num_rows)]
            scores = [future.result().score for future in futures]
            times.append(time.perf_counter() - start_s)
            assert scores == [float(i % 50) for i in range(num_rows)]
    return statistics.median(times), warm_up_s


def main() -> None:
    """Prints shares of the ideal throughput (workers / seconds of a call), milliseconds per row, and start times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = read_arguments(parser, rows=16, repeats=1)
    per_process = PoolLimits(WORKERS, timeout_s=60)
    concurrent = PoolLimits(ASYNC_PROCESSES, timeout_s=60, max_concurrent=WORKERS // ASYNC_PROCESSES)
    ideal_s = arguments.rows * SLEEP_S / WORKERS
    figures: list[Figure] = []
    for what, spec, limits in (
        ("sync", FunctionSpec("sync", f"{HERE}:sleep"), per_process),
        ("async", FunctionSpec("async", f"{HERE}:sleep_async"), concurrent),
        ("batched", FunctionSpec("batched", f"{HERE}:sleep_batch", batch_size=BATCH_SIZE), per_process),
    ):
        run_s, warm_up_s = seconds_of(spec, limits, arguments.rows, arguments.repeats)
        figures.append(alone(f"{what}: share of the ideal throughput", "", ideal_s / run_s, bound=0.9))
        figures.append(alone(f"{what}: start of {limits.workers} processes", "s", warm_up_s))
    spec = FunctionSpec("none", f"{HERE}:no_operation")
    for workers in (1, 2):
        run_s, _ = seconds_of(spec, PoolLimits(workers, timeout_s=60), arguments.rows, arguments.repeats)
        figures.append(alone(f"no-op, {workers} processes: per row", "ms", run_s / arguments.rows * 1e3))
    ran_on = "\n".join(f"{name}: {value}" for name, value in machine().items())
    sys.stdout.write(f"{ran_on}\n\n{table(figures)}\n")


if __name__ == "__main__":
    main()
