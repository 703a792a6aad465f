"""Rows of all file formats, and corrupt files."""

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from flowrl.config import DataFile
from flowrl.data.messages import DataError
from flowrl.data.reading.raw_rows import read_chunks
from flowrl.data.reading.reader import read_conversations
from flowrl.data.reading.row_problems import RowProblem
from tests.errors import rejects

ROWS = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(path: Path, **settings: Any) -> list[Any]:
    """Returns parsed rows, and the reasons of problems."""
    rows = [row for chunk in read_chunks(DataFile(path=path), rows_per_chunk=2, **settings) for row in chunk.rows]
    return [
        row.reason if isinstance(row, RowProblem) else json.loads(row) if isinstance(row, bytes) else row
        for row in rows
    ]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def as_arrow(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def as_arrow_file(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def as_parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def saved_dataset(path: Path) -> Path:
    path.mkdir()
    as_arrow(path / "data-00000-of-00001.arrow")
    (path / "state.json").write_text("{}")
    return path


FORMATS = {
    "a.jsonl": lambda path: write(path, LINES),
    "a.jsonl.gz": lambda path: write(path, gzip.compress(LINES)),
    "a.jsonl.zst": lambda path: write(path, zstandard.compress(LINES[:40]) + zstandard.compress(LINES[40:])),
    "a.json": lambda path: write(path, json.dumps(ROWS, indent=1).encode()),
    "no_end_of_line": lambda path: write(path, LINES.rstrip()),
    "windows.jsonl": lambda path: write(path, LINES.replace(b"\n", b"\r\n")),
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
    "b.arrow": as_arrow_file,
    "folder": saved_dataset,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_rows(name: str, tmp_path: Path) -> None:
    assert read(FORMATS[name](tmp_path / name)) == ROWS


def test_chunks_number_their_rows(tmp_path: Path) -> None:
    chunks = list(read_chunks(DataFile(path=write(tmp_path / "a.jsonl", LINES)), rows_per_chunk=2))
    assert [(chunk.first_line, len(chunk.rows)) for chunk in chunks] == [(1, 2), (3, 2), (5, 1)]


def test_one_object_on_several_lines_is_one_row(tmp_path: Path) -> None:
    assert read(write(tmp_path / "1.json", json.dumps(ROWS[0], indent=2).encode())) == ROWS[:1]


def test_a_list_of_turns_per_line_is_not_an_array_of_rows(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}]
    path = write(tmp_path / "a.jsonl", (json.dumps(turns) + "\n").encode() * 2)
    assert read(path) == [turns, turns]
    assert read(write(tmp_path / "b.json", json.dumps([{"messages": turns}]).encode())) == [{"messages": turns}]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_rows_before_the_end_of_a_truncated_file_are_read(suffix: str, tmp_path: Path) -> None:
    many = LINES * 2000
    packed = gzip.compress(many) if suffix == "gz" else zstandard.compress(many)
    rows = read(write(tmp_path / f"a.jsonl.{suffix}", packed[: len(packed) // 2]))
    assert rows[-1] == "unreadable_file" and rows.count("unreadable_file") == 1
    assert all(row in ROWS for row in rows[:-1])


def test_a_truncated_parquet_or_arrow_file_is_one_problem(tmp_path: Path) -> None:
    for path in (as_parquet(tmp_path / "a.parquet"), as_arrow(tmp_path / "a.arrow")):
        write(path, path.read_bytes()[:-40])
        assert read(path)[-1:] == ["unreadable_file"]


def test_one_row_of_a_table_that_is_not_utf8_is_one_problem(tmp_path: Path) -> None:
    offsets, values = pa.py_buffer(np.array([0, 1, 3, 4], dtype=np.int32)), pa.py_buffer(b"ab\xffc")
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, [None, offsets, values])})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        assert read(tmp_path / name) == [{"text": "a"}, "invalid_utf8", {"text": "c"}]


def test_a_date_that_python_does_not_support_is_null(tmp_path: Path) -> None:
    dates = pa.array([0, 10**18], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["a", "b"], "date": dates}), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet")
    assert first["date"].year == 1970 and second == {"text": "b", "date": None}


def test_a_value_that_contains_a_date_that_python_does_not_support_is_null(tmp_path: Path) -> None:
    dates = pa.array([[0], [10**18]], pa.list_(pa.timestamp("us")))
    pq.write_table(pa.table({"text": ["<a", "<b"], "dates": dates}), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet")
    assert first["dates"][0].year == 1970 and second == {"text": "<b", "dates": None}


def test_a_date_after_the_year_9999_that_arrow_can_write_is_text(tmp_path: Path) -> None:
    dates = pa.array([10**18], pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table({"date": dates}), tmp_path / "a.parquet")
    ((text,),) = (row.values() for row in read(tmp_path / "a.parquet"))
    assert isinstance(text, str) and not text.startswith("<")


def test_a_truncated_array_ends_with_a_problem(tmp_path: Path) -> None:
    text = json.dumps(ROWS).encode()
    assert read(write(tmp_path / "a.json", text[:-20])) == [*ROWS[:4], "invalid_json"]
    assert read(write(tmp_path / "b.json", text[:-1])) == [*ROWS, "unreadable_file"]


def test_a_corrupt_array_is_never_read_as_complete(tmp_path: Path) -> None:
    first, second = (json.dumps(row).encode() for row in ROWS[:2])
    cases = {
        b"[%b, %b] [%b]" % (first, second, first): [*ROWS[:2], "invalid_json"],
        b"[%b %b]" % (first, second): [ROWS[0], "invalid_json"],
    }
    for number, (content, expected) in enumerate(cases.items()):
        assert read(write(tmp_path / f"{number}.json", content)) == expected


def test_one_element_of_an_array_that_is_not_utf8_is_one_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'[{"text": "a"}, {"text": "\xff"}, {"text": "c"}]')
    rows = read_conversations(path, kind="text", strict=False)
    assert [row.text for row in rows] == [("", "a"), ("", "c")]
    with rejects(path, 2, "UTF-8", error=DataError):
        read_conversations(path, kind="text")


UNUSUAL = {
    '{"text": "a", "answer": NaN}': ("answer", "NaN"),
    '{"text": "a", "answer": -Infinity}': ("answer", "-Infinity"),
    '{"text": "a", "meta": {"scores": [1, 2.5, 1e999]}}': ("meta.scores.2", "1e999"),
    '{"text": "a", "text": "b"}': ("text", "twice"),
    '{"text": "a", "meta": [{"x": 1, "y": 2, "x": 1}]}': ("meta.0.x", "twice"),
}
"""A row that Python's JSON parser accepts, but JSON does not -> facts of the error."""


@pytest.mark.parametrize("row", UNUSUAL)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "array.json", "object.json"])
def test_nan_and_repeated_keys_are_rejected_with_their_key(name: str, row: str, tmp_path: Path) -> None:
    content = {"array.json": f'[{{"text": "first"}},\n{row}, {{"text": "c"}}]', "object.json": row.replace(", ", ",\n")}
    text = content.get(name, f'{{"text": "first"}}\n{row}\n{{"text": "c"}}\n').encode()
    path = write(tmp_path / name, gzip.compress(text) if name.endswith("gz") else text)
    with rejects(path, 1 if name == "object.json" else 2, *UNUSUAL[row], error=DataError):
        read_conversations(path, kind="text")
    if name != "object.json":
        rows = read_conversations(path, kind="text", strict=False)
        assert [row.text for row in rows] == [("", "first"), ("", "c")]


def test_numbers_of_json_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b' {"text": "a", "x": [1, -0.5, 1e-999, 2E3], "y": {"x": 1}}\t\r\n')
    (row,) = read_conversations(path, kind="text")
    assert row.columns == {"x": [1, -0.5, 0.0, 2000.0], "y": {"x": 1}}


def test_nan_in_a_table_is_null(tmp_path: Path) -> None:
    values = {"text": ["a"], "x": [float("nan")], "y": [[1.0, float("inf")]], "z": [{"x": float("-inf")}]}
    pq.write_table(pa.table(values), tmp_path / "a.parquet")
    (row,) = read_conversations(tmp_path / "a.parquet", kind="text")
    assert row.columns == {"x": None, "y": [1.0, None], "z": {"x": None}}


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ('{"text": "ü"}\n'.encode("utf-16"), ("UTF-16", "UTF-8")),
        ('{"text": "a"}\n'.encode("utf-16-le"), ("UTF-16", "UTF-8", "docs/data.md")),
        (b"\x89PNG\x00\xff\n", ("binary", "docs/data.md")),
        (b'{"text": "\xfc"}\n', ("0xfc", "UTF-8")),
        (b'{"text": "a\n', ("JSON", "column", 10)),
        (b"5\n", (5, "JSON", "object")),
        (b"null\n", ("null", "JSON", "object")),
    ],
)
def test_a_row_that_is_not_a_json_object_is_reported_with_its_cause(
    tmp_path: Path, content: bytes, facts: tuple[object, ...]
) -> None:
    path = write(tmp_path / "a.jsonl", content)
    with rejects(path, 1, *facts, error=DataError) as caught:
        read_conversations(path, kind="text")
    assert "at at" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "A.XLSX"])
def test_a_table_of_an_unsupported_format_is_rejected_with_the_supported_ones(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"prompt,completion\n1,2\n")
    with rejects(path, name.split(".")[1], "parquet", ".jsonl", error=DataError):
        read_conversations(path)


def test_a_malformed_first_line_does_not_hide_the_other_lines(tmp_path: Path) -> None:
    lines = LINES.splitlines(keepends=True)
    for name, first in (("a.json", b'{"question": [\n'), ("b.jsonl", b'[{"question": "a"}]\n')):
        chunks = read_chunks(DataFile(path=write(tmp_path / name, first + b"".join(lines))))
        rows = [row for chunk in chunks for row in chunk.rows]
        assert rows[0] == first.strip() and [json.loads(row) for row in rows[1:]] == ROWS


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", codecs.BOM_UTF8 + LINES)) == ROWS


def test_a_folder_with_another_manifest_is_a_folder_of_files(tmp_path: Path) -> None:
    write(tmp_path / "manifest.json", b"{}")
    write(tmp_path / "a.jsonl", LINES)
    assert read(tmp_path) == ROWS


def test_a_line_of_10_mb_is_one_problem_between_rows(tmp_path: Path) -> None:
    long = b'{"text": "' + b"x" * 10_000_000 + b'"}\n'
    path = write(tmp_path / "a.jsonl", LINES + long + LINES + long.strip())
    assert read(path) == [*ROWS, "row_too_large", *ROWS, "row_too_large"]
    assert len(read(path, max_row_bytes=1 << 24)) == 12


def test_a_folder_without_data_and_a_missing_library_are_rejected(tmp_path: Path) -> None:
    with rejects(tmp_path, error=DataError):
        list(read_chunks(DataFile(path=tmp_path)))
