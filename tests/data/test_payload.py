import numpy as np
import pytest

from flowrl.data.payload import ColumnError, Payload, concat, merge


def payload_of(*lengths: int) -> Payload:
    """Row i is numbered i, named `ri`, and has tokens that count on over the rows."""
    rows = {"x": np.arange(len(lengths)), "name": [f"r{i}" for i in range(len(lengths))]}
    return Payload(len(lengths), rows, {"ids": np.arange(sum(lengths))}, np.array(lengths, dtype=np.int64))


def lists(payload: Payload) -> dict[str, list]:
    """Every column's values, and the lengths, as lists."""
    columns = payload.rows | payload.tokens | ({} if payload.lengths is None else {"lengths": payload.lengths})
    return {name: column if isinstance(column, list) else column.tolist() for name, column in columns.items()}


def test_a_slice_takes_rows_with_their_tokens():
    taken = payload_of(1, 2, 3).take(slice(1, 3), {"x": "x", "ids": "ids"})
    assert lists(taken) == {"x": [1, 2], "ids": [1, 2, 3, 4, 5], "lengths": [2, 3]}


def test_positions_take_rows_in_their_own_order():
    taken = payload_of(1, 2, 3).take(np.array([2, 0, 2]), {"name": "name", "ids": "ids"})
    assert lists(taken) == {"name": ["r2", "r0", "r2"], "ids": [3, 4, 5, 0, 3, 4, 5], "lengths": [3, 1, 3]}


def test_rows_without_tokens_can_be_taken():
    taken = payload_of(0, 2, 0).take(np.array([0, 2]), {"ids": "ids"})
    assert lists(taken) == {"ids": [], "lengths": [0, 0]}


def test_no_rows_at_all_can_be_taken():
    taken = payload_of(1, 2).take(slice(0, 0), {"x": "x", "name": "name", "ids": "ids"})
    assert taken.num_rows == 0 and lists(taken) == {"x": [], "name": [], "ids": [], "lengths": []}


def test_lengths_stay_behind_without_a_token_column():
    assert payload_of(1, 2).take(None, {"x": "x"}).lengths is None


def test_columns_are_renamed_on_the_way():
    taken = payload_of(2).take(None, {"a": "x", "b": "x", "tokens": "ids"})
    assert taken.columns == ("a", "b", "tokens")


def test_a_missing_column_is_named_with_those_there():
    with pytest.raises(ColumnError, match=r"'y' is not in this payload; it has x, name, ids"):
        payload_of(1).take(None, {"y": "y"})


def test_concat_stacks_every_kind_of_column():
    whole = payload_of(1, 2, 3)
    every = {name: name for name in whole.columns}
    joined = concat([whole.take(slice(2, 3), every), whole.take(slice(0, 2), every)])
    expected = {"x": [2, 0, 1], "name": ["r2", "r0", "r1"], "ids": [3, 4, 5, 0, 1, 2], "lengths": [3, 1, 2]}
    assert lists(joined) == expected


def test_an_empty_part_may_not_know_that_its_column_holds_objects():
    empty = Payload(0, {"name": np.zeros(0, dtype=np.float32)})
    assert concat([empty, Payload(1, {"name": ["a"]}), empty]).rows["name"] == ["a"]


def test_concat_keeps_the_mark_of_bfloat16_columns():
    part = Payload(1, {"x": np.array([7], dtype=np.int16)}, bfloat16=frozenset({"x"}))
    assert concat([part, part]).bfloat16 == {"x"}


def test_merge_refuses_columns_of_different_rows():
    with pytest.raises(ColumnError, match=r"columns x have 2 rows, but y have 3"):
        merge([Payload(2, {"x": np.arange(2)}), Payload(3, {"y": np.arange(3)})])


def test_merge_refuses_token_columns_of_different_lengths():
    other = Payload(2, {}, {"values": np.arange(3)}, np.array([2, 1]))
    with pytest.raises(ColumnError, match=r"token columns ids and values differ in the lengths of rows"):
        merge([payload_of(1, 2), other])


def test_merge_puts_columns_side_by_side():
    merged = merge([payload_of(1, 2).take(None, {"ids": "ids"}), Payload(2, {"y": np.arange(2)})])
    assert lists(merged) == {"y": [0, 1], "ids": [0, 1, 2], "lengths": [1, 2]}


def test_a_copy_shares_nothing():
    whole = Payload(1, {"x": np.zeros(1), "names": [["a"]]}, {"ids": np.zeros(2)}, np.array([2]))
    copied = whole.copy()
    for array in (copied.rows["x"], copied.tokens["ids"], copied.lengths):
        assert isinstance(array, np.ndarray)
        array[:] = 9
    copied.rows["names"][0].append("b")
    assert lists(whole) == {"x": [0], "names": [["a"]], "ids": [0, 0], "lengths": [2]}
