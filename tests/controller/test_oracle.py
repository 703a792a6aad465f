"""Random chains of edits and calls: the same rows in the same order on the oracle, inline and on Ray."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl import Batch, Cluster, Placement, WorkerGroup
from tests.conftest import BackendName, make_backend
from tests.controller.chain import Chain
from tests.controller.oracle import METHODS, SAME_ROWS, Rows, concat

TOKENS = ("ids", "next")
EDITS = ("rename", "reorder", "repeat", "take", "minibatch", "concat", "store") + () * 2 + ("call",) * 3
PLACEMENT = Placement.model_validate(
    {
        "device": "cpu",
        "pools": {"three": [3], "four": [4]},
        "roles": {"flat": "three", "tensor": {"pool": "four", "tp": 2}, "deep": {"pool": "four", "sp": 2, "pp": 2}},
    }
)


@pytest.fixture(scope="module")
def groups(backend: BackendName) -> Iterator[list[WorkerGroup]]:
    """Three data-parallel ranks; two with tensor-parallel peers; one behind sequence and pipeline peers."""
    with Cluster(PLACEMENT, backend=make_backend(backend), num_threads=1) as cluster:
        yield [cluster.group(role, Chain) for role in ("flat", "tensor", "deep")]


@dataclass
class Pair:
    """A batch and the rows of the oracle."""

    batch: Batch
    rows: Rows


def make_pair(count: int) -> Pair:
    """Returns distinct rows, so that an exchange is detected; some rows have no tokens."""
    rows = [(x, [(3 * x + k) % 10 for k in range(x % 4)], f"n{x}") for x in range(count)]
    expected = Rows(tuple({"x": x, "ids": ids, "name": name} for x, ids, name in rows))
    batch = Batch.from_columns(
        rows={"x": np.array([x for x, _, _ in rows], dtype=np.int64), "name": [name for _, _, name in rows]},
        tokens={"ids": np.array([token for _, ids, _ in rows for token in ids], dtype=np.int64)},
        lengths=[len(ids) for _, ids, _ in rows],
    )
    return Pair(batch, expected)


def edited(pair: Pair, data: st.DataObject, groups: list[WorkerGroup]) -> Pair:
    """Applies one random edit or call to both."""
    kind = data.draw(st.sampled_from(EDITS))
    count = len(pair.rows.rows)
    if kind == "call":
        return called(pair, data, groups)
    if kind == "store":
        return stored(pair, data.draw(st.sampled_from(groups)))
    if kind == "rename":
        # Renaming twice separates the name in the batch from the name in the block.
        swap = {"ids": "other"}
        moved = Pair(pair.batch.rename(swap), pair.rows.rename(swap))
        return Pair(moved.batch.rename({"other": "ids"}), moved.rows.rename({"other": "ids"}))
    if kind == "repeat":
        times, interleave = data.draw(st.integers(0, 3)), data.draw(st.booleans())
        return Pair(pair.batch.repeat(times, interleave=interleave), pair.rows.repeat(times, interleave=interleave))
    if kind == "reorder":
        order = data.draw(st.permutations(range(count)))
        return Pair(pair.batch.reorder(order), pair.rows.take(order))
    if kind == "minibatch":
        size, seed = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
        order = np.random.default_rng([seed, 0]).permutation(count)[:size]
        first = next(pair.batch.minibatches(size, seed=seed), pair.batch.rows([]))
        return Pair(first, pair.rows.take(order.tolist()))
    if kind == "concat":
        split_at = data.draw(st.integers(0, count))
        parts = [list(range(split_at, count)), list(range(count)), list(range(split_at))]
        return Pair(
            Batch.concat([pair.batch.rows(part) for part in parts]), concat([pair.rows.take(part) for part in parts])
        )
    positions = data.draw(st.lists(st.integers(0, count - 1), max_size=8)) if count else []
    return Pair(pair.batch.rows(positions), pair.rows.take(positions))


def called(pair: Pair, data: st.DataObject, groups: list[WorkerGroup]) -> Pair:
    name = data.draw(st.sampled_from(sorted(METHODS)))
    group = data.draw(st.sampled_from(groups))
    result = Pair(getattr(group, name)(pair.batch), pair.rows.call(METHODS[name]))
    if name not in SAME_ROWS:
        return result
    return Pair(pair.batch.union(result.batch), pair.rows.union(result.rows))


def stored(pair: Pair, group: WorkerGroup) -> Pair:
    """Appends the rows with other tokens, in a column that has another name in its block."""
    batch, rows = pair.batch.select(*pair.batch.columns), pair.rows
    batch["ids"] = group.shift(pair.batch)
    rows = rows.union(rows.call(METHODS["shift"]).rename({"next": "ids"}))
    return Pair(Batch.concat([pair.batch, batch]), concat([pair.rows, rows]))


def values_of(batch: Batch) -> list[dict[str, Any]]:
    """Returns the batch as rows of the oracle."""
    columns: dict[str, list] = {}
    for name in batch.columns:
        values = batch.get(name)
        if name in TOKENS:
            values = [part.tolist() for part in values.split(batch.get("length").tolist())] if len(batch) else []
        columns[name] = values if isinstance(values, list) else values.tolist()
    return [{name: values[i] for name, values in columns.items()} for i in range(len(batch))]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.one_of(st.just(0), st.integers(1, 12)), length=st.integers(2, 7), data=st.data())
def test_any_chain_of_edits_and_calls_matches_the_oracle(
    groups: list[WorkerGroup], count: int, length: int, data: st.DataObject
) -> None:
    first = make_pair(count)
    pair = first
    for _ in range(length):
        pair = edited(pair, data, groups)
    assert values_of(pair.batch) == list(pair.rows.rows)
    assert len(pair.batch) == len(pair.rows.rows)
    # The input is unchanged.
    assert values_of(first.batch) == list(make_pair(count).rows.rows)
