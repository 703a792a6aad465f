"""Cost of a call, compared with raw Ray in the same run.

python -m tests.benchmarks.dispatch [--repeats N] [--only PART ...] [--table]

Prints JSON, or a table in markdown: medians of interleaved pairs, and the median of the pairs' ratios.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import ray

from flowrl import Batch, Cluster, Placement, WorkerGroup
from tests.benchmarks import batch_edits, driver_time, group_start, group_transfer
from tests.benchmarks.bench_workers import COLUMNS, RANKS, ROWS, TOKENS, Bench, Raw
from tests.benchmarks.measure import Figure, machine, paired, read_arguments, table

PARTS = ("calls", "send", "start", "driver", "edits")


def calls(first: WorkerGroup, raws: list, repeats: int) -> list[Figure]:
    """Times calls without arguments, with a small batch, and with a large batch that the driver creates and reads."""

    def raw_nothing() -> None:
        ray.get([actor.nothing.remote() for actor in raws])

    small = {name: np.ones(32, dtype=np.float32) for name in COLUMNS}
    big = {name: np.ones(ROWS * TOKENS, dtype=np.float32) for name in COLUMNS}

    def ours(tokens: dict[str, np.ndarray], lengths: list[int]) -> None:
        first.echo(Batch.from_columns(tokens=tokens, lengths=lengths)).payload()

    def raw(tokens: dict[str, np.ndarray], put: Callable, gathered: bool) -> None:
        each = len(tokens["a"]) // RANKS
        parts = [{name: v[each * i : each * (i + 1)] for name, v in tokens.items()} for i in range(RANKS)]
        shards = ray.get([actor.echo.remote(put(part)) for actor, part in zip(raws, parts, strict=True)])
        if gathered:
            for name in COLUMNS:
                np.concatenate([part[name] for part in shards])

    eight, many = partial(ours, small, [4] * 8), partial(ours, big, [TOKENS] * ROWS)
    few = max(5, repeats // 3)
    round_trip = "64 MiB scattered, echoed, gathered"
    return [
        paired("no-op on 4 ranks", first.nothing, raw_nothing, repeats * 5, 1.3),
        paired("8 rows x 4 columns, round trip", eight, partial(raw, small, _itself, True), repeats * 5, 1.5),
        paired(f"{round_trip} as full columns", many, partial(raw, big, ray.put, True), few, 1.5),
        paired(f"{round_trip}; raw Ray keeps shards", many, partial(raw, big, ray.put, False), few, 1.5),
    ]


def _itself(part: dict) -> dict:
    return part


def on_ray(parts: list[str], repeats: int) -> list[Figure]:
    """Measures two groups of four processes, and as many Ray actors."""
    if not {"calls", "send", "start"} & set(parts):
        return []
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_lineage_pinning_enabled": "0"}  # as in a run
    ray.init(
        "local",
        num_cpus=16,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        logging_level=logging.ERROR,
        log_to_driver=False,  # stdout contains only the figures
    )
    results = group_start.figures(max(3, repeats // 5)) if "start" in parts else []
    if parts == ["start"]:
        return results
    placement = Placement(device="cpu", pools={"p": [RANKS], "q": [RANKS]}, roles={"first": "p", "second": "q"})
    with Cluster(placement, num_threads=1) as cluster:
        first, second = cluster.group("first", Bench), cluster.group("second", Bench)
        raws, others = ([Raw.remote() for _ in range(RANKS)] for _ in range(2))
        cluster.wait_for_calls()
        ray.get([actor.nothing.remote() for actor in raws + others])
        results += calls(first, raws, repeats) if "calls" in parts else []
        results += group_transfer.figures(first, second, raws, others, repeats) if "send" in parts else []
    return results


def main() -> None:
    """Measures the selected parts, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--table", action="store_true")
    arguments = read_arguments(parser, repeats=1, only=["calls", "edits"])
    ran_on = machine()
    results = on_ray(arguments.only, arguments.repeats)
    results += driver_time.figures(arguments.repeats) if "driver" in arguments.only else []
    results += batch_edits.figures(max(5, arguments.repeats // 3)) if "edits" in arguments.only else []
    if arguments.table:
        ran = ", ".join(f"{name} {value}" for name, value in ran_on.items())
        sys.stdout.write(f"{ran}\n\n{table(results)}\n")
    else:
        sys.stdout.write(json.dumps({"machine": ran_on, "figures": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
