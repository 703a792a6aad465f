import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data.batch.payload import (
    LONG_RUN_BYTES,
    ColumnError,
    Payload,
    Runs,
    Source,
    collect,
    common_dtype,
    copy_objects,
    merge,
    offsets,
)


def payload_of(*lengths: int) -> Payload:
    """Row i is numbered i, named `ri`, and has tokens that count on over the rows."""
    rows = {"x": np.arange(len(lengths)), "name": [f"r{i}" for i in range(len(lengths))]}
    return Payload(len(lengths), rows, {"ids": np.arange(sum(lengths))}, np.array(lengths, dtype=np.int64))


def lists(payload: Payload) -> dict[str, list]:
    """Every column's values, and the lengths, as lists."""
    columns = payload.rows | payload.tokens | ({} if payload.lengths is None else {"lengths": payload.lengths})
    return {name: column if isinstance(column, list) else column.tolist() for name, column in columns.items()}


def test_a_slice_takes_rows_with_their_tokens():
    selected = payload_of(1, 2, 3).take(slice(1, 3), {"x": "x", "ids": "ids"})
    assert lists(selected) == {"x": [1, 2], "ids": [1, 2, 3, 4, 5], "lengths": [2, 3]}


def test_positions_take_rows_in_their_own_order():
    selected = payload_of(1, 2, 3).take(np.array([2, 0, 2]), {"name": "name", "ids": "ids"})
    assert lists(selected) == {"name": ["r2", "r0", "r2"], "ids": [3, 4, 5, 0, 3, 4, 5], "lengths": [3, 1, 3]}


def test_rows_without_tokens_can_be_taken():
    selected = payload_of(0, 2, 0).take(np.array([0, 2]), {"ids": "ids"})
    assert lists(selected) == {"ids": [], "lengths": [0, 0]}


def test_no_rows_at_all_can_be_taken():
    selected = payload_of(1, 2).take(slice(0, 0), {"x": "x", "name": "name", "ids": "ids"})
    assert selected.num_rows == 0 and lists(selected) == {"x": [], "name": [], "ids": [], "lengths": []}


def test_lengths_are_dropped_without_a_token_column():
    assert payload_of(1, 2).take(None, {"x": "x"}).lengths is None


def test_columns_are_renamed_when_read():
    selected = payload_of(2).take(None, {"a": "x", "b": "x", "tokens": "ids"})
    assert selected.columns == ("a", "b", "tokens")


def test_a_missing_column_is_named_with_the_available_ones():
    with pytest.raises(ColumnError, match=r"'y'.* x, name, ids"):
        payload_of(1).take(None, {"y": "y"})


def stacked(*parts: Payload) -> Payload:
    """All rows of several payloads, one after another."""
    ends = np.cumsum([part.num_rows for part in parts])
    every = [
        Source(part, {name: name for name in part.columns}, None, slice(int(end) - part.num_rows, int(end)))
        for part, end in zip(parts, ends, strict=True)
    ]
    return collect(int(ends[-1]), every)


def test_rows_of_every_kind_of_column_are_stacked():
    payload = payload_of(1, 2, 3)
    every = {name: name for name in payload.columns}
    joined = stacked(payload.take(slice(2, 3), every), payload.take(slice(0, 2), every))
    expected = {"x": [2, 0, 1], "name": ["r2", "r0", "r1"], "ids": [3, 4, 5, 0, 1, 2], "lengths": [3, 1, 2]}
    assert lists(joined) == expected


def test_an_empty_shard_takes_the_object_dtype_of_the_others():
    empty = Payload(0, {"name": np.zeros(0, dtype=np.float32)})
    assert stacked(empty, Payload(1, {"name": ["a"]}), empty).rows["name"] == ["a"]


def test_stacked_rows_keep_the_bfloat16_marker():
    part = Payload(1, {"x": np.array([7], dtype=np.int16)}, bfloat16=frozenset({"x"}))
    assert stacked(part, part).bfloat16 == {"x"}


def test_numbers_stacked_with_objects_become_objects():
    assert stacked(Payload(1, {"x": np.array([1])}), Payload(1, {"x": ["a"]})).rows["x"] == [1, "a"]


def test_the_wider_of_two_dtypes_is_used():
    joined = stacked(Payload(1, {"x": np.array([1])}), Payload(1, {"x": np.array([0.5])})).rows["x"]
    assert (np.asarray(joined).dtype, list(joined)) == (np.float64, [1, 0.5])


def test_a_column_has_one_shape():
    parts = [Payload(1, {"x": np.zeros((1, width))}) for width in (2, 3)]
    with pytest.raises(ColumnError, match=r"x.*\(2,\).*\(3,\)"):
        stacked(*parts)


def test_a_column_has_one_kind():
    parts = [Payload(1, {"x": np.zeros(1)}), Payload(1, {}, {"x": np.zeros(2)}, np.array([2]))]
    with pytest.raises(ColumnError, match="'x'"):
        stacked(*parts)


SHARDS = st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=4)


@given(SHARDS, st.data(), st.integers(1, 300))
@settings(deadline=None)
def test_rows_of_shards_are_written_to_their_targets(shards: list[list[int]], data: st.DataObject, width: int):
    """Short and long runs of rows and tokens, in and out of order."""
    shards = [[length * width for length in lengths] for lengths in shards]
    rows = [(s, i) for s, lengths in enumerate(shards) for i in range(len(lengths))]
    order = data.draw(st.permutations(range(len(rows))))
    sources, expected, done = [], [[]] * len(rows), 0
    for lengths in shards:
        payload = payload_of(*lengths)
        chosen = data.draw(st.permutations(range(len(lengths))))
        at = order[done : done + len(lengths)]
        done += len(lengths)
        every = {name: name for name in payload.columns}
        sources.append(Source(payload, every, np.array(chosen, dtype=int), np.array(at, dtype=int)))
        for target, source in zip(at, chosen, strict=True):
            first = sum(lengths[:source])
            expected[target] = [source, f"r{source}", list(range(first, first + lengths[source]))]
    collected = collect(len(rows), sources)
    assert collected.lengths is not None
    tokens = np.split(collected.tokens["ids"], np.cumsum(collected.lengths)[:-1]) if rows else []
    columns = zip(collected.rows["x"], collected.rows["name"], tokens, strict=True)
    assert [[x, name, ids.tolist()] for x, name, ids in columns] == expected


@pytest.mark.parametrize("rows", [None, slice(1, 3), np.array([2, 0, 2])])
def test_the_size_of_rows_is_known_before_they_are_read(rows):
    columns = {"a": "x", "name": "name", "ids": "ids"}
    payload = payload_of(1, 2, 3)
    assert payload.nbytes_of(rows, columns) == payload.take(rows, columns).nbytes


def test_merge_rejects_columns_of_different_numbers_of_rows():
    with pytest.raises(ColumnError, match=r"x .* 2\b.* y .* 3"):
        merge([Payload(2, {"x": np.arange(2)}), Payload(3, {"y": np.arange(3)})])


def test_merge_rejects_token_columns_of_different_lengths():
    other = Payload(2, {}, {"values": np.arange(3)}, np.array([2, 1]))
    with pytest.raises(ColumnError, match=r"ids .*values"):
        merge([payload_of(1, 2), other])


def test_merge_combines_columns():
    merged = merge([payload_of(1, 2).take(None, {"ids": "ids"}), Payload(2, {"y": np.arange(2)})])
    assert lists(merged) == {"y": [0, 1], "ids": [0, 1, 2], "lengths": [1, 2]}


def test_a_copy_shares_no_memory():
    payload = Payload(1, {"x": np.zeros(1), "names": [["a"]]}, {"ids": np.zeros(2)}, np.array([2]))
    copied = payload.copy()
    for array in (copied.rows["x"], copied.tokens["ids"], copied.lengths):
        assert isinstance(array, np.ndarray)
        array[:] = 9
    copied.rows["names"][0].append("b")
    assert lists(payload) == {"x": [0], "names": [["a"]], "ids": [0, 0], "lengths": [2]}


def copied(runs: Runs, column: np.ndarray, size: int) -> list:
    out = np.full((size, *column.shape[1:]), -1, dtype=column.dtype)
    runs.copy(column, out)
    return out.tolist()


def test_consecutive_elements_are_one_run():
    runs = Runs.of(np.array([4, 5, 6, 0, 1]), np.array([0, 1, 3, 4, 5]))
    assert (runs.sources.tolist(), runs.targets.tolist(), runs.counts.tolist()) == ([4, 6, 0], [0, 3, 4], [2, 1, 2])


def test_short_runs_are_copied_to_their_targets():
    runs = Runs.of(np.array([2, 0, 1]), np.array([0, 3, 4]))
    assert copied(runs, np.array([10, 11, 12]), 5) == [12, -1, -1, 10, 11]


def test_adjacent_short_runs_keep_their_order():
    assert copied(Runs.of(np.array([2, 0, 0]), np.arange(3)), np.array([[1, 2], [3, 4], [5, 6]]), 3) == [
        [5, 6],
        [1, 2],
        [1, 2],
    ]


def test_long_runs_are_copied_to_their_targets():
    size = LONG_RUN_BYTES // 8
    column = np.arange(2 * size)
    assert copied(Runs(np.array([size, 0]), np.array([0, size]), np.array([size, size])), column, 2 * size) == [
        *range(size, 2 * size),
        *range(size),
    ]


@pytest.mark.parametrize("width", [1, LONG_RUN_BYTES])
def test_narrow_values_are_copied_to_a_wider_dtype(width: int):
    out = np.zeros((2, width))
    Runs.of(np.array([1, 0]), np.array([0, 1])).copy(np.array([[1], [2]], dtype=np.int32).repeat(width, axis=1), out)
    assert out[:, 0].tolist() == out[:, -1].tolist() == [2, 1]


def test_tokens_are_copied_with_their_rows():
    lengths = np.array([2, 0, 3])
    tokens = Runs.of(np.array([2, 0]), np.array([0, 1])).of_tokens(offsets(lengths), offsets(lengths[[2, 0]]))
    assert copied(tokens, np.arange(5), 5) == [2, 3, 4, 0, 1]


def test_no_runs_copy_nothing():
    assert copied(Runs.of(np.zeros(0, dtype=int), np.zeros(0, dtype=int)), np.arange(3), 2) == [-1, -1]


def test_common_dtype_is_the_promoted_dtype():
    assert common_dtype([np.zeros(1, np.int64), np.zeros(1, np.int64)]) == np.int64
    assert common_dtype([np.zeros(1, np.int64), np.zeros(1, np.float32)]) == np.float64


def test_copies_of_objects_share_nothing():
    objects = [[{"from": "human", "content": "a"}], [1, 2], None]
    copied = copy_objects(objects)
    assert copied == objects
    copied[0][0]["content"] = "b"
    copied[1].append(3)
    assert objects == [[{"from": "human", "content": "a"}], [1, 2], None]


def test_objects_that_cannot_be_pickled_are_copied():
    function = lambda: 1  # noqa: E731 (pickle rejects it)
    objects = [function, [1]]
    copied = copy_objects(objects)
    assert copied[0] is function and copied[1] == [1] and copied[1] is not objects[1]
