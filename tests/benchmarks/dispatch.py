"""The cost of a call, beside raw Ray doing the same in the same run.

python tests/benchmarks/dispatch.py [--repeats N] prints JSON: medians in milliseconds, ours and raw, and their ratio.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import ray
import torch
from tensordict import TensorDict

from flowrl import Batch, Cluster, Dispatch, Placement, Worker, make_table, register
from flowrl.data.table import lengths, num_rows

RANKS = 4
ROWS, TOKENS = 512, 8192
"""A payload of 64 MiB: 512 rows of 8,192 tokens in four float32 columns."""

COLUMNS = ("a", "b", "c", "d")
WARMUP = 3


class Bench(Worker):
    """What is called: nothing, small tables, large ones."""

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=COLUMNS, writes=COLUMNS)
    def echo(self, table: TensorDict) -> TensorDict:
        return make_table(tokens=dict(table["tokens"].items()), lengths=lengths(table))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=COLUMNS)
    def make(self, table: TensorDict) -> TensorDict:
        count = num_rows(table)
        return make_table(
            tokens={name: torch.ones(count * TOKENS) for name in COLUMNS},
            lengths=torch.full((count,), TOKENS, dtype=torch.int64),
        )

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=COLUMNS)
    def read(self, table: TensorDict) -> dict:
        """Reads a value of every column, so that every column has arrived."""
        assert all(len(column) == 0 or column[-1] == 1 for column in table["tokens"].values())
        return {}


@ray.remote(num_cpus=0)
class Raw:
    """The same by hand."""

    def nothing(self) -> None:
        return None

    def echo(self, columns: dict) -> dict:
        return columns

    def make(self, count: int) -> dict:
        return {name: np.ones(count * TOKENS, dtype=np.float32) for name in COLUMNS}

    def read(self, columns: dict) -> None:
        assert all(column[-1] == 1 for column in columns.values())


def paired(ours: Callable[[], object], raw: Callable[[], object], repeats: int) -> dict[str, float]:
    """Medians of both, measured in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + WARMUP):
        for side, call in zip(times, (ours, raw), strict=True):
            start_s = time.perf_counter()
            call()
            if number >= WARMUP:
                side.append((time.perf_counter() - start_s) * 1e3)
    mine, theirs = (statistics.median(side) for side in times)
    return {"ours_ms": round(mine, 2), "raw_ms": round(theirs, 2), "ratio": round(mine / theirs, 2)}


def main() -> None:
    """Measures on two groups of four processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    placement = Placement(device="cpu", pools={"p": [RANKS], "q": [RANKS]}, roles={"first": "p", "second": "q"})
    with Cluster(placement, num_threads=1) as cluster:
        first, second = cluster.group("first", Bench), cluster.group("second", Bench)
        raws, others = ([Raw.remote() for _ in range(RANKS)] for _ in range(2))
        cluster.settle()
        ray.get([actor.nothing.remote() for actor in raws + others])
        figures = {
            "no-op on 4 ranks": paired(first.nothing, lambda: ray.get([a.nothing.remote() for a in raws]), repeats * 5)
        }

        tokens = {name: np.ones(32, dtype=np.float32) for name in COLUMNS}
        small = Batch.from_columns(tokens=tokens, lengths=[4] * 8)
        parts = [{name: values[8 * i : 8 * i + 8] for name, values in tokens.items()} for i in range(RANKS)]
        figures["8 rows x 4 columns, there and back"] = paired(
            lambda: first.echo(small).payload(),
            lambda: ray.get([a.echo.remote(part) for a, part in zip(raws, parts, strict=True)]),
            repeats * 5,
        )

        seeds = Batch.from_columns(rows={"x": np.zeros(ROWS, dtype=np.int64)})
        made = first.make(seeds)
        refs = [a.make.remote(ROWS // RANKS) for a in raws]
        cluster.settle()
        ray.wait(refs, num_returns=RANKS)

        def raw_read() -> None:
            ray.get([a.read.remote(ref) for a, ref in zip(others, refs, strict=True)])

        figures["64 MiB handed on, same split"] = paired(lambda: second.read(made).get(), raw_read, repeats)
        other_split = made.rows(np.r_[64:ROWS, 0:64])
        figures["64 MiB handed on, another split"] = paired(lambda: second.read(other_split).get(), raw_read, repeats)
        shuffled = made.rows(np.random.default_rng(0).permutation(ROWS))
        figures["64 MiB handed on, shuffled"] = paired(lambda: second.read(shuffled).get(), raw_read, repeats)

        big = {name: np.ones(ROWS * TOKENS, dtype=np.float32) for name in COLUMNS}
        quarter = ROWS * TOKENS // RANKS
        cut = [{name: values[quarter * i : quarter * (i + 1)] for name, values in big.items()} for i in range(RANKS)]

        def ours_round_trip() -> None:
            first.echo(Batch.from_columns(tokens=big, lengths=[TOKENS] * ROWS)).payload()

        def raw_round_trip() -> None:
            ray.get([a.echo.remote(ray.put(part)) for a, part in zip(raws, cut, strict=True)])

        figures["64 MiB scattered, echoed, gathered"] = paired(ours_round_trip, raw_round_trip, max(5, repeats // 3))
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
