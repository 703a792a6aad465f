from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.config import UserError
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.payload import ColumnError
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from tests.engines.tables import take_rows

Row = dict[str, Any]


def batch_of(rows: list[Row]) -> Batch:
    """A batch of the row columns `x` and `name` and the token column `ids`, from rows that have all three."""
    row_columns = {name: [row[name] for row in rows] for name in ("x", "name")}
    tokens = np.array([token for row in rows for token in row["ids"]], dtype=np.int64)
    return Batch.from_columns(row_columns, {"ids": tokens}, [len(row["ids"]) for row in rows])


def rows_of(batch: Batch) -> list[Row]:
    """The batch as rows again."""
    columns: dict[str, list] = {}
    for name in batch.columns:
        values = batch.get(name)
        if isinstance(values, torch.Tensor) and name == "ids":
            values = [list(part) for part in torch.split(values, batch.lengths().tolist())]
        columns[name] = [np.asarray(value).tolist() if name != "name" else value for value in values]
    return [{name: columns[name][i] for name in columns} for i in range(len(batch))]


def numbered(count: int) -> list[Row]:
    return [{"x": i, "name": f"r{i}", "ids": list(range(10 * i, 10 * i + i % 4))} for i in range(count)]


Edit = tuple[str, list[int]]
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["rows", "reverse", "repeat", "tile", "mask", "slice", "concat", "minibatch"]),
        st.lists(st.integers(0, 100), min_size=1, max_size=6),
    ),
    max_size=5,
)


def edited(batch: Batch, rows: list[Row], edit: Edit) -> tuple[Batch, list[Row]]:
    """The same edit on a batch and on its rows."""
    kind, numbers = edit
    count = len(rows)
    chosen = [n % count for n in numbers] if count else []
    mask = np.array([i in chosen for i in range(count)], dtype=bool)
    cases = {
        "rows": lambda: (batch.rows(chosen), [rows[i] for i in chosen]),
        "reverse": lambda: (batch.reorder(np.arange(count)[::-1]), rows[::-1]),
        "repeat": lambda: (batch.repeat(2), [row for row in rows for _ in range(2)]),
        "tile": lambda: (batch.repeat(2, interleave=False), rows * 2),
        "mask": lambda: (batch.rows(mask), [row for row, selected in zip(rows, mask, strict=True) if selected]),
        "slice": lambda: (batch.rows(slice(numbers[0] % 5, None, 2)), rows[numbers[0] % 5 :: 2]),
        "concat": lambda: (Batch.concat([batch, batch.rows(chosen)]), rows + [rows[i] for i in chosen]),
        "minibatch": lambda: (batch, rows),
    }
    return cases[kind]()


@given(st.integers(0, 6), EDITS)
@settings(deadline=None, max_examples=80)
def test_edits_of_a_batch_match_edits_of_a_list_of_rows(count: int, edits: list[Edit]):
    batch, rows = batch_of(numbered(count)), numbered(count)
    for edit in edits:
        if len(rows) < 50:
            batch, rows = edited(batch, rows, edit)
    assert len(batch) == len(rows)
    assert rows_of(batch) == rows


@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 3), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_minibatches_contain_every_row_once_per_epoch(count: int, size: int, epochs: int, seed: int):
    parts = list(batch_of(numbered(count)).minibatches(size, epochs=epochs, seed=seed))
    seen = [row["name"] for part in parts for row in rows_of(part)]
    assert sorted(seen) == sorted([f"r{i}" for i in range(count)] * epochs)
    assert all(len(part) <= size for part in parts)


def test_minibatches_of_sections_have_an_equal_part_of_each_and_every_row_once():
    batch = batch_of(numbered(24)).with_sections(2).union(batch_of(numbered(24)).rename({"x": "y"}))
    parts = [part.get("x").tolist() for part in batch.minibatches(10, seed=1)]
    assert [len(part) for part in parts] == [10, 10, 4]
    assert sorted(x for part in parts for x in part) == list(range(24))
    for part in parts:
        half = len(part) // 2
        assert max(part[:half]) < 12 <= min(part[half:])


@pytest.mark.parametrize(("num_rows", "size"), [(24, 3), (9, 4)])
def test_sections_that_minibatches_cannot_split_evenly_are_rejected(num_rows: int, size: int):
    batch = batch_of(numbered(num_rows)).with_sections(2)
    with pytest.raises(UserError, match=r"placement\.routes"):
        list(batch.minibatches(size))


def test_sections_stay_with_the_rows_whatever_their_columns():
    batch = batch_of(numbered(24)).with_sections(2)
    plain = batch_of(numbered(24)).rename({"x": "y"})
    others = [batch.select("x"), batch.drop("name"), batch.rename({"name": "id"})]
    for other in (*others, batch.union(plain), plain.union(batch)):
        first = next(other.minibatches(4, seed=1)).get("x").tolist()
        assert max(first[:2]) < 12 <= min(first[2:])


@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 6), st.integers(1, 3), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_minibatches_keep_groups_together(ids: list[int], size: int, epochs: int, seed: int):
    batch = Batch.from_columns({"group": ids, "row": list(range(len(ids)))}, num_rows=len(ids))
    parts = list(batch.minibatches(size, epochs=epochs, seed=seed, groups="group")) if ids else []
    rows = [part.get("row").tolist() for part in parts]
    assert sorted(row for part in rows for row in part) == sorted([*range(len(ids))] * epochs)
    for part in rows:
        groups = {ids[row] for row in part}
        assert len(part) == sum(ids.count(group) for group in groups)
        assert len(part) <= size or len(groups) == 1
        members = [[row for row in part if ids[row] == group] for group in groups]
        assert all(member == sorted(member) for member in members)


def test_minibatches_of_groups_have_a_new_order_in_each_epoch():
    batch = Batch.from_columns({"group": [i // 2 for i in range(40)]})
    first, second = (part.get("group").tolist() for part in batch.minibatches(40, epochs=2, seed=3, groups="group"))
    assert first != second and sorted(first) == sorted(second)


def test_minibatches_of_groups_reject_sections_and_columns_that_are_no_integers():
    batch = Batch.from_columns({"group": [0, 0], "name": ["a", "b"], "score": [0.5, 1.0]})
    with pytest.raises(UserError, match=r"placement\.routes"):
        list(batch.with_sections(2).minibatches(2, groups="group"))
    for column in ("name", "score", "missing"):
        with pytest.raises(ColumnError, match=column):
            list(batch.minibatches(2, groups=column))


def test_minibatches_depend_only_on_seed_and_epoch():
    first, again = (
        [part.get("x").tolist() for part in batch_of(numbered(20)).minibatches(20, epochs=2, seed=3)] for _ in range(2)
    )
    assert first == again and first[0] != first[1]


def test_a_minibatch_of_no_rows_is_rejected():
    with pytest.raises(ValueError, match=r"\b0\b"):
        next(batch_of(numbered(2)).minibatches(0))


@pytest.mark.parametrize(
    "edit",
    [
        lambda batch: batch.rows([2, 0]),
        lambda batch: batch.reorder([2, 0, 1]),
        lambda batch: batch.repeat(2),
        lambda batch: batch.select("x"),
        lambda batch: Batch.concat([batch, batch]),
    ],
    ids=["rows", "reorder", "repeat", "select", "concat"],
)
def test_the_seed_of_minibatches_survives_edits(edit: Callable[[Batch], Batch]):
    assert edit(batch_of(numbered(3)).with_seed((3, 1))).seed == (3, 1)


def test_rows_given_as_dictionaries_become_arrays_and_objects():
    batch = Batch.from_rows(
        [{"a": 1, "b": 0.5, "c": True, "d": "x", "e": [1]}, {"a": 2, "b": 1.5, "c": False, "d": "y", "e": []}]
    )
    dtypes = {name: getattr(batch.get(name), "dtype", list) for name in batch.columns}
    assert dtypes == {"a": torch.int64, "b": torch.float64, "c": torch.bool, "d": list, "e": list}


def test_rows_with_different_keys_are_rejected():
    with pytest.raises(ColumnError, match=r"row 1 .* b, row 0 .* a"):
        Batch.from_rows([{"a": 1}, {"b": 1}])


def test_columns_of_different_numbers_of_rows_are_rejected():
    with pytest.raises(ColumnError, match=r"\{'a': 2, 'b': 3\}"):
        Batch.from_columns({"a": [1, 2], "b": [1, 2, 3]})


def test_token_columns_must_sum_to_the_lengths():
    with pytest.raises(ColumnError, match=r"3.* \{'ids': 4\}"):
        Batch.from_columns(tokens={"ids": [1, 2, 3, 4]}, lengths=[1, 2])


def test_an_array_of_strings_is_an_object_column():
    assert Batch.from_columns({"name": np.array(["a", "b"])}).get("name") == ["a", "b"]


def test_a_batch_copies_the_arrays_that_it_is_created_from():
    x, ids = torch.zeros(2), np.zeros(2)
    batch = Batch.from_columns({"x": x}, {"ids": ids}, [1, 1])
    x.fill_(1)
    ids.fill(1)
    assert batch.get("x").tolist() == batch.get("ids").tolist() == [0, 0]


def test_values_returned_by_get_are_copies():
    batch = batch_of(numbered(2))
    batch.get("x").fill_(7)
    batch.get("name").append("r2")
    batch.tensordict()["tokens", "ids"].fill_(7)
    assert rows_of(batch) == numbered(2)


def test_select_drop_and_rename_change_only_columns():
    batch = batch_of(numbered(3))
    assert batch.select("name", "x").columns == ("name", "x")
    assert batch.drop("ids").columns == ("x", "name")
    assert rows_of(batch.select("x", "name").rename({"x": "name", "name": "x"}))[1] == {"name": 1, "x": "r1"}


@pytest.mark.parametrize(
    "edit", [lambda b: b["y"], lambda b: b.drop("y"), lambda b: b.rename({"y": "z"}), lambda b: b.get("y")]
)
def test_a_missing_column_is_named_with_the_available_ones(edit):
    with pytest.raises(ColumnError, match=r"'y'.* x, name, ids"):
        edit(batch_of(numbered(2)))


def test_two_columns_cannot_get_one_name():
    with pytest.raises(ColumnError, match="name, name, ids"):
        batch_of(numbered(1)).rename({"x": "name"})


def test_union_replaces_a_column_of_the_same_name():
    batch = batch_of(numbered(2)).union(Batch.from_columns({"x": [8, 9], "y": [1, 2]}))
    assert batch.columns == ("x", "name", "ids", "y")
    assert batch.get("x").tolist() == [8, 9]


def test_a_union_stays_aligned_after_row_selection():
    chosen = batch_of(numbered(4)).rows([3, 1])
    both = chosen.union(Batch.from_columns({"y": [30, 10]})).reorder([1, 0])
    assert (both.get("x").tolist(), both.get("y").tolist()) == ([1, 3], [10, 30])


def test_union_rejects_different_numbers_of_rows():
    with pytest.raises(ColumnError, match=r"\by\b.* 3\b.* 2"):
        batch_of(numbered(2)).union(Batch.from_columns({"y": [1, 2, 3]}))


def test_a_batch_without_columns_takes_the_rows_of_the_first():
    batch = Batch.from_columns()
    batch["x"] = Batch.from_columns({"y": [1, 2, 3]})
    assert (len(batch), batch.get("x").tolist()) == (3, [1, 2, 3])


def test_a_column_is_stored_under_the_name_that_the_driver_chooses():
    batch = batch_of(numbered(2))
    batch["doubled"] = Batch.from_columns({"x": [0, 2]})
    assert (batch.get("doubled").tolist(), batch.get("x").tolist()) == ([0, 2], [0, 1])


def test_storing_takes_a_batch_of_one_column():
    with pytest.raises(ColumnError, match=r"batch\['y'\].*x, name, ids.*union"):
        batch_of(numbered(2))["y"] = batch_of(numbered(2))


def test_token_columns_of_different_lengths_are_rejected_when_read_together():
    batch = Batch.from_columns(tokens={"a": [1, 2, 3]}, lengths=[1, 2])
    both = batch.union(Batch.from_columns(tokens={"b": [1, 2, 3]}, lengths=[2, 1]))
    with pytest.raises(ColumnError, match=r"\ba\b.* \bb\b"):
        both.tensordict()


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1], [0, 1, 3]])
def test_an_order_names_every_row_once(order: list[int]):
    with pytest.raises(ColumnError, match=r"\b0\b.* 2\b"):
        batch_of(numbered(3)).reorder(order)


@pytest.mark.parametrize("positions", [[3], [-1]])
def test_rows_outside_the_batch_are_rejected(positions: list[int]):
    with pytest.raises(ColumnError, match=r"\b0\b.* 2\b"):
        batch_of(numbered(3)).rows(positions)


def test_a_mask_has_an_entry_per_row():
    with pytest.raises(ColumnError, match=r"\b2\b.* 3\b"):
        batch_of(numbered(3)).rows(np.array([True, False]))


def test_concat_needs_the_same_columns():
    with pytest.raises(ColumnError, match="concat"):
        Batch.concat([batch_of(numbered(2)), batch_of(numbered(2)).select("x")])


def test_lengths_follow_the_rows_without_a_column_being_read():
    batch = batch_of(numbered(4)).rows([3, 0, 3])
    assert batch.lengths().tolist() == batch.get("length").tolist() == [3, 0, 3]


def test_a_batch_without_token_columns_has_no_lengths():
    with pytest.raises(ColumnError, match="token"):
        Batch.from_columns({"x": [1]}).lengths()


def test_a_function_adds_columns_to_the_batch():
    def double(table, factor):
        return make_tensordict({"y": table["rows", "x"] * factor}, {"next": table["tokens", "ids"] + 1}, lengths(table))

    batch = batch_of(numbered(4)).apply(double, ("x", "ids"), ("y", "next"), factor=2)
    assert batch.columns == ("x", "name", "ids", "y", "next")
    assert (batch.get("y").tolist(), batch.get("next").tolist()) == ([0, 2, 4, 6], [11, 21, 22, 31, 32, 33])


def test_a_function_may_drop_rows():
    def odd(table):
        return take_rows(table, torch.nonzero(table["rows", "x"] % 2).flatten())

    selected = batch_of(numbered(4)).apply(odd, ("x", "name", "ids"), ("x", "name", "ids"), rows="unknown")
    assert rows_of(selected) == [row for row in numbered(4) if row["x"] % 2]


def test_a_function_that_writes_another_column_is_rejected():
    with pytest.raises(ColumnError, match=r"<lambda>.* z .* y"):
        batch_of(numbered(1)).apply(lambda table: make_tensordict({"z": table["rows", "x"]}), ("x",), ("y",))


def test_reduce_returns_the_value():
    assert batch_of(numbered(4)).reduce(lambda table: int(table["rows", "x"].sum()), ("x",)).get() == 6


def test_an_empty_batch_has_no_rows():
    assert len(Batch({})) == len(Batch.from_columns()) == len(Batch.from_rows([])) == 0
