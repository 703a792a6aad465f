"""Throughput of `ScoringPool` with a reward function that sleeps 0.1 s, and the overhead per row and per `generate`.

python -m tests.benchmarks.rewards [--rows N] [--repeats N]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from flowrl import Batch, Cluster, Placement
from flowrl.config import ModelConfig, RewardConfig, RolloutConfig
from flowrl.rewards.pool import PoolLimits, ScoringPool
from flowrl.rewards.reward_function import FunctionSpec
from flowrl.schedules.rewards import Rewards
from flowrl.workers import Reward, Rollout
from tests.benchmarks import reward_functions, step
from tests.benchmarks.measure import Figure, alone, machine, read_arguments, table
from tests.benchmarks.reward_functions import SLEEP_S

WORKERS = 16
"""Calls that run at the same time: in one process each, or as async calls in `ASYNC_PROCESSES`."""

ASYNC_PROCESSES = 2
BATCH_SIZE = 8
FUNCTIONS = reward_functions.__name__


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


def generate_figures(num_pairs: int) -> list[Figure]:
    """Returns the time that an immediate function adds to a call of `generate` with 32 rows: medians over pairs of
    calls with and without the function.
    """
    roles = {"rollout": "main", "reward": "main"}
    placement = Placement(device="cpu", pools={"main": [1]}, roles=roles)
    prompts = Batch.from_rows(
        [{"prompt_ids": [20 + i // 8] * 8, "prompt_id": i // 8, "sample": i % 8} for i in range(32)]
    )
    config = RewardConfig(function=f"{FUNCTIONS}:score")
    with tempfile.TemporaryDirectory() as folder, Cluster(placement, backend="inline", num_threads=1) as cluster:
        step.write_inputs(Path(folder), "81k", 8)
        reward = cluster.group("reward", Reward, config)
        model = ModelConfig(path=Path(folder) / "policy")
        rollout = cluster.group("rollout", Rollout, RolloutConfig(max_response_tokens=32), model, seed=0)
        rewards = Rewards(config, {"reward": reward}, "reward")
        rewards.connect(rollout)
        sides = (
            lambda: rollout.generate(prompts, **rewards.generate_arguments).get("scores"),
            lambda: rollout.generate(prompts).get("response"),
        )
        added: list[tuple[float, float]] = []
        start_s = _cpu_of_descendants()
        for number in range(num_pairs):
            times = {side: _wall_and_cpu(sides[side]) for side in ((0, 1) if number % 2 else (1, 0))}
            added.append((times[0][0] - times[1][0], times[0][1] - times[1][1]))
        descendants_s = (_cpu_of_descendants() - start_s) / num_pairs
    wall_s, cpu_s = map(statistics.median, zip(*added[num_pairs // 10 :], strict=True))  # without a warmup
    return [
        alone(f"generate, 32 rows: {what} of a function that returns at once", "ms", seconds * 1e3, bound=10)
        for what, seconds in (("wall time", wall_s), ("CPU time", cpu_s + descendants_s))
    ]


def _wall_and_cpu(call: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds and the CPU time of this process that a call takes."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def _cpu_of_descendants() -> float:
    """Returns the CPU time of the running processes that this process has started."""
    me = psutil.Process()
    return step.cpu_seconds(me) - sum(me.cpu_times()[:2])


def main() -> None:
    """Prints shares of the ideal throughput (workers / seconds of a call), milliseconds per row, start times, and the
    cost of a reward per call of `generate`.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = read_arguments(parser, rows=16, repeats=1)
    per_process = PoolLimits(WORKERS, timeout_s=60)
    concurrent = PoolLimits(ASYNC_PROCESSES, timeout_s=60, max_concurrent=WORKERS // ASYNC_PROCESSES)
    ideal_s = arguments.rows * SLEEP_S / WORKERS
    figures: list[Figure] = []
    for what, spec, limits in (
        ("sync", FunctionSpec("sync", f"{FUNCTIONS}:sleep"), per_process),
        ("async", FunctionSpec("async", f"{FUNCTIONS}:sleep_async"), concurrent),
        ("batched", FunctionSpec("batched", f"{FUNCTIONS}:sleep_batch", batch_size=BATCH_SIZE), per_process),
    ):
        run_s, warm_up_s = seconds_of(spec, limits, arguments.rows, arguments.repeats)
        figures.append(alone(f"{what}: share of the ideal throughput", "", ideal_s / run_s, bound=0.9))
        figures.append(alone(f"{what}: start of {limits.workers} processes", "s", warm_up_s))
    spec = FunctionSpec("none", f"{FUNCTIONS}:no_operation")
    for workers in (1, 2):
        run_s, _ = seconds_of(spec, PoolLimits(workers, timeout_s=60), arguments.rows, arguments.repeats)
        figures.append(alone(f"no-op, {workers} processes: per row", "ms", run_s / arguments.rows * 1e3))
    figures += generate_figures(40 * arguments.repeats)
    ran_on = "\n".join(f"{name}: {value}" for name, value in machine().items())
    sys.stdout.write(f"{ran_on}\n\n{table(figures)}\n")


if __name__ == "__main__":
    main()
