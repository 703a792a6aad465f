"""Measures sending 64 MiB from one group of four ranks to another: time, memory, and bytes through the driver."""

from collections.abc import Callable
from functools import partial

import numpy as np
import psutil
import ray

from flowrl import Batch, WorkerGroup
from tests.benchmarks.bench_workers import RANKS, ROWS, TOKENS, private_bytes
from tests.benchmarks.measure import MIB, Figure, alone, paired, received_bytes

EACH = ROWS // RANKS
SHIFT = EACH // 2
"""Number of rows by which the case "another split" shifts the rows."""

ORDER = np.random.default_rng(0).permutation(ROWS)


def figures(first: WorkerGroup, second: WorkerGroup, raws: list, others: list, repeats: int) -> list[Figure]:
    """Times transfers and raw Ray reads of the same rows, each with and without creating the rows."""
    seeds = Batch.from_columns(rows={"x": np.zeros(ROWS, dtype=np.int64)})
    splits: dict[str, tuple[Callable[[Batch], Batch], Callable[[list], object], float]] = {
        "same split": (lambda batch: batch, partial(_raw_same, others), 1.3),
        "another split": (lambda b: b.rows(np.r_[SHIFT:ROWS, 0:SHIFT]), partial(_raw_shifted, others), 1.5),
        "shuffled": (lambda batch: batch.reorder(ORDER), partial(_raw_shuffled, others), 2.0),
    }
    made, refs = first.make(seeds), _raw_make(raws)
    second.read(made).get()
    results = []
    for name, (edit, raw, bound) in splits.items():
        what = f"64 MiB passed on, {name}"
        batch = edit(made)
        read = partial(lambda batch: second.read(batch).get(), batch)
        same = partial(_raw_same, others)
        results.append(paired(what, read, partial(raw, refs), repeats, bound))
        if name != "same split":
            results.append(paired(f"{what}; raw Ray keeps the split", read, partial(same, refs), repeats))
        both = partial(lambda edit: second.read(edit(first.make(seeds))).get(), edit)
        what = f"64 MiB produced and passed on, {name}"
        results.append(paired(what, both, lambda raw=raw: raw(_raw_make(raws)), repeats, bound))
        if name != "same split":
            raw_same = partial(lambda same: same(_raw_make(raws)), same)
            results.append(paired(f"{what}; raw Ray keeps the split", both, raw_same, repeats, bound))
    return results + _memory(second, made) + _driver(first, second, seeds)


def _raw_make(raws: list) -> list:
    return [actor.make.remote(EACH) for actor in raws]


def _raw_same(others: list, refs: list) -> None:
    ray.get([actor.read.remote(ref) for actor, ref in zip(others, refs, strict=True)])


def _raw_shifted(others: list, refs: list) -> None:
    ranges = [(SHIFT, EACH), (0, SHIFT)]
    calls = [a.read_ranges.remote(ranges, refs[i], refs[(i + 1) % RANKS]) for i, a in enumerate(others)]
    ray.get(calls)


def _raw_shuffled(others: list, refs: list) -> None:
    calls = []
    for i, actor in enumerate(others):
        own_rows = ORDER[EACH * i : EACH * (i + 1)]
        positions = [np.flatnonzero(own_rows // EACH == part) for part in range(RANKS)]
        rows = [own_rows[target] % EACH for target in positions]
        calls.append(actor.read_rows.remote(rows, positions, *refs))
    ray.get(calls)


def _memory(second: WorkerGroup, made: Batch) -> list[Figure]:
    """Measures the private memory of the consumers, without pages of the object store."""
    shard = ROWS * TOKENS * 4 * 4 / RANKS
    shuffled, results = made.reorder(ORDER), []
    for name, batch in (("same split", made), ("shuffled", shuffled)):
        parts = [batch.rows(slice(EACH * i, EACH * (i + 1))) for i in range(RANKS)]
        # The first call also loads modules.
        second.growth([part.rows([0]) for part in parts]).get()
        second.remember_memory()
        worst = max(second.growth(parts).get())
        what = f"consumer's private memory (USS) per byte of its shard, one column of four, {name}"
        results.append(alone(what, "x", worst / shard, 0.3))
    return results


def _driver(first: WorkerGroup, second: WorkerGroup, seeds: Batch) -> list[Figure]:
    """Measures the bytes that a transfer sends to the driver, and the memory of the driver."""
    second.read(first.make(seeds)).get()
    process = psutil.Process()
    before, private, resident = received_bytes(), private_bytes(), process.memory_info().rss
    second.read(first.make(seeds)).get()
    after = received_bytes()
    received = sum(size - before.get(inode, 0) for inode, size in after.items())
    grown = max(process.memory_info().rss - resident, private_bytes() - private)
    return [
        alone("driver receives over TCP, 64 MiB produced and passed on", "KiB", received / 1024, 64),
        alone("driver's memory growth, shared pages too, 64 MiB produced and passed on", "MiB", grown / MIB),
    ]
