"""Workers of the dispatch benchmark, and Ray actors that do the same without flowrl."""

from collections.abc import Sequence

import numpy as np
import psutil
import ray
import torch
from tensordict import TensorDict

from flowrl import Dispatch, Worker, make_tensordict, register
from flowrl.data.batch.tensordicts import lengths, num_rows

RANKS = 4
ROWS, TOKENS = 512, 8192
"""A payload of 64 MiB: 512 rows of 8,192 tokens in four float32 columns."""

COLUMNS = ("a", "b", "c", "d")
WIDE = tuple(f"c{i}" for i in range(8))
"""Columns of eight blocks, each of which is the result of one call."""

Columns = dict[str, np.ndarray]


class Bench(Worker):
    """Methods without arguments, with small batches and with large batches."""

    private_before = 0

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=COLUMNS, writes=COLUMNS)
    def echo(self, table: TensorDict) -> TensorDict:
        return make_tensordict(tokens=dict(table["tokens"].items()), lengths=lengths(table))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=COLUMNS)
    def make(self, table: TensorDict) -> TensorDict:
        count = num_rows(table)
        return make_tensordict(
            tokens={name: torch.ones(count * TOKENS) for name in COLUMNS},
            lengths=torch.full((count,), TOKENS, dtype=torch.int64),
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("y",))
    def column(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"y": table["rows", "x"]})

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=COLUMNS)
    def read(self, table: TensorDict) -> dict:
        """Reads a value of every column, so that every column has arrived."""
        assert all(len(column) == 0 or column[-1] == 1 for column in table["tokens"].values())
        return {}

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=WIDE)
    def read_wide(self, table: TensorDict) -> dict:
        return {}

    @register(Dispatch.ONE_TO_ALL)
    def remember_memory(self) -> None:
        self.private_before = private_bytes()

    @register(Dispatch.DP_COMPUTE, blocking=False, reads=("a",))
    def growth(self, table: TensorDict) -> int:
        """Returns the growth of private bytes since `remember_memory`, after all values of a column have been read."""
        assert float(table["tokens", "a"].min()) == 1
        return private_bytes() - self.private_before


class CollectiveBench(Bench):
    """A class with collectives: each rank waits until the inputs of all ranks are available."""

    collective = True


def private_bytes() -> int:
    """Returns the private memory of this process, without pages of the object store."""
    return psutil.Process().memory_full_info().uss


@ray.remote(num_cpus=0)
class Raw:
    """The same methods on dictionaries of flat arrays."""

    def nothing(self) -> None:
        return None

    def echo(self, columns: Columns) -> Columns:
        return columns

    def make(self, count: int) -> Columns:
        return {name: np.ones(count * TOKENS, dtype=np.float32) for name in COLUMNS}

    def read(self, columns: Columns) -> None:
        """Reads a value of every column."""
        assert all(column[-1] == 1 for column in columns.values())

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *parts: Columns) -> None:
        """Concatenates rows of several objects."""
        columns = {
            name: np.concatenate(
                [p[name][first * TOKENS : last * TOKENS] for p, (first, last) in zip(parts, ranges, strict=True)]
            )
            for name in COLUMNS
        }
        self.read(columns)

    def read_rows(self, rows: Sequence[np.ndarray], positions: Sequence[np.ndarray], *parts: Columns) -> None:
        """Gathers rows of several objects: `rows` of each object become the rows at `positions` of the result."""
        columns = {}
        for name in COLUMNS:
            column = np.empty((sum(map(len, positions)), TOKENS), dtype=np.float32)
            for part, source, target in zip(parts, rows, positions, strict=True):
                column[target] = part[name].reshape(-1, TOKENS)[source]
            columns[name] = column.reshape(-1)
        self.read(columns)
