"""Reads unparsed rows in chunks: JSON lines (also compressed), JSON arrays, parquet, arrow folders and Hub datasets."""

import codecs
import importlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from flowrl.config import DataFile
from flowrl.data.folders.input_paths import find_dataset_problem
from flowrl.data.messages import DataError
from flowrl.data.reading.generated_rows import generate_lines
from flowrl.data.reading.json_values import UnusualValue, parse_strictly
from flowrl.data.reading.row_problems import RowProblem

_BLOCK_BYTES = 1 << 20
_GZIP = 31
"""zlib's window bits for a stream with a gzip header."""
_COMPRESSED = (".gz", ".zst")
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow")
MANIFEST = "manifest.json"
"""File that marks a folder of `flowrl data prepare`."""


@dataclass(slots=True)
class RawChunk:
    """Consecutive rows of a file."""

    file: Path
    first_line: int
    """Line of the first row. In a table, its 1-based index."""
    rows: list[Any] = field(default_factory=list)
    """Rows as bytes (a JSON line) or as Python values. A RowProblem replaces a row that cannot be read."""
    num_bytes: int = 0
    """Bytes of the file that were read for this chunk, for progress reports."""


def read_chunks(source: DataFile, *, rows_per_chunk: int = 1000, max_row_bytes: int = 8 << 20) -> Iterator[RawChunk]:
    """Yields all rows of a file, a folder of files, a dataset of the Hub, or reasoning-gym.

    A row that cannot be read is a RowProblem. A corrupt file yields one RowProblem after its last complete row.

    Raises DataError if the path does not exist, or if a library that the format needs is missing.
    """
    if source.path is None:
        lines = generate_lines(source)
        first = 1
        while batch := list(islice(lines, rows_per_chunk)):
            yield RawChunk(source.source, first, batch, 0)
            first += len(batch)
        return
    if problem := find_dataset_problem(source.path):
        raise DataError(f"dataset {source.path} cannot be read: {problem}")
    for file in data_files(source):
        rows, position = _rows_of(file, source, max_row_bytes)
        line, num_bytes = 1, 0
        while batch := list(islice(rows, rows_per_chunk)):
            now = position()
            yield RawChunk(file, line, batch, now - num_bytes)
            line, num_bytes = line + len(batch), now


def data_files(source: DataFile) -> list[Path]:
    """Returns the files of a source. Returns a Hub name, or the name of generated rows, unchanged."""
    path = source.source
    if not path.is_dir():
        return [path]
    if (path / MANIFEST).is_file() and (path / "jsonl").is_dir():
        path = path / "jsonl"
    elif (path / source.split).is_dir():
        path = path / source.split
    for suffixes in ((".arrow",), (".parquet",), (".jsonl", ".json", ".ndjson")):
        names = [*suffixes, *(suffix + end for suffix in suffixes for end in _COMPRESSED)]
        files = sorted(
            file
            for file in path.iterdir()
            if file.is_file() and file.name.endswith(tuple(names)) and file.name not in _ARROW_METADATA
        )
        if files:
            return files
    raise DataError(
        f"dataset {source.path} cannot be read: the folder has no file that ends with {', '.join(_SUFFIXES)}; set a "
        f"file, or a folder with such files"
    )


_ARROW_METADATA = ("dataset_info.json", "state.json", "dataset_dict.json", MANIFEST)
"""Files that `datasets` and `flowrl data prepare` write next to the rows."""


def _rows_of(file: Path, source: DataFile, max_row_bytes: int) -> tuple[Iterator[Any], Any]:
    """Returns the rows of a file, and a function that returns the number of bytes read."""
    if not file.exists():
        return _hub_rows(source), lambda: 0
    if file.suffix == ".parquet":
        return _parquet_rows(file), lambda: 0
    if file.suffix == ".arrow":
        return _arrow_rows(file), lambda: 0
    try:
        handle = file.open("rb")
    except OSError as error:
        raise DataError(f"dataset {file} cannot be read ({error.strerror})") from error
    return _json_rows(file, handle, max_row_bytes), lambda: 0 if handle.closed else handle.tell()


# JSON.


def _json_rows(file: Path, handle: BinaryIO, max_row_bytes: int) -> Iterator[Any]:
    with handle:
        blocks = _decompressed(file, handle)
        first = next(blocks, b"")
        if isinstance(first, bytes):
            first = first.removeprefix(codecs.BOM_UTF8)
        if isinstance(first, bytes) and first.lstrip()[:1] == b"[" and not _is_list_per_line(first):
            yield from _array_rows(first, blocks)
        elif isinstance(first, bytes) and file.suffix == ".json" and _is_object_of_lines(first):
            text = b"".join([first, *(block for block in blocks if isinstance(block, bytes))])
            # Otherwise the file has JSON lines, and its first line is malformed.
            yield from [text] if _is_json(text) else _lines([text], max_row_bytes)
        else:
            yield from _lines(chain([first], blocks), max_row_bytes)


def _is_object_of_lines(block: bytes) -> bool:
    """Returns whether a file is one JSON object on several lines, like the files of MATH."""
    return block.lstrip()[:1] == b"{" and not block.lstrip().partition(b"\n")[0].rstrip().endswith(b"}")


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_list_per_line(block: bytes) -> bool:
    """Returns whether the first line is a complete list of turns, and not the start of a list of rows."""
    line, _, rest = block.lstrip().partition(b"\n")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if rest.strip():
        return True
    turn = value[0] if isinstance(value, list) and value else None
    return isinstance(turn, dict) and bool({"from", "role"} & turn.keys()) and bool({"content", "value"} & turn.keys())


def _lines(blocks: Iterable[bytes | RowProblem], max_bytes: int) -> Iterator[bytes | RowProblem]:
    """Yields the lines of a file without their ends. A line longer than `max_bytes` is not buffered."""
    pending, is_skipping = b"", False
    for block in blocks:
        if isinstance(block, RowProblem):
            # Drops the incomplete last line, which belongs to the corrupt part.
            yield block
            return
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            line, start = pending + block[start:end], end + 1
            pending = b""
            if is_skipping or len(line) > max_bytes:
                yield _too_large(max_bytes)
                is_skipping = False
            else:
                yield line.removesuffix(b"\r")
        if not is_skipping:
            pending += block[start:]
            if len(pending) > max_bytes:
                pending, is_skipping = b"", True
    if is_skipping:
        yield _too_large(max_bytes)
    elif pending:
        yield pending


def _too_large(max_bytes: int) -> RowProblem:
    size = max_bytes / (1 << 20)
    return RowProblem("row_too_large", f"the row has more than {size:g} MB: shorten it, or raise max_row_mb")


def _array_rows(first: bytes, blocks: Iterator[bytes | RowProblem]) -> Iterator[Any]:
    """Yields the elements of a JSON array. Reads the complete file into memory."""
    problem, parts = None, [first]
    for block in blocks:
        if isinstance(block, RowProblem):
            problem = block
        else:
            parts.append(block)
    # A byte that is not UTF-8 becomes a surrogate, which the parser of the row reports.
    text = b"".join(parts).decode(errors="surrogateescape")
    position = _skip_space(text, text.index("[") + 1)
    while position < len(text) and text[position] != "]":
        try:
            value, position = parse_strictly(text, position)
        except UnusualValue as unusual:
            value, position = unusual, unusual.end
        except (ValueError, RecursionError) as error:
            yield problem or RowProblem("invalid_json", f"the JSON array is corrupt from this element on ({error})")
            return
        yield value
        position = _skip_space(text, position)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
        elif text[position : position + 1] not in ("]", ""):
            yield RowProblem("invalid_json", "the JSON array has no comma after the element before")
            return
    if position >= len(text):
        yield problem or RowProblem("unreadable_file", "the JSON array has no end: the file is truncated")
    elif _skip_space(text, position + 1) < len(text):
        yield RowProblem("invalid_json", "the file has text after the end of the JSON array: remove it")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _decompressed(file: Path, handle: BinaryIO) -> Iterator[bytes | RowProblem]:
    """Yields the content of a file in blocks, and a RowProblem where the file is corrupt."""
    try:
        if file.suffix == ".gz":
            yield from _decompressed_blocks(handle, lambda: zlib.decompressobj(wbits=_GZIP), padding=b"\0")
        elif file.suffix == ".zst":
            yield from _zstd_blocks(handle)
        else:
            while block := handle.read(_BLOCK_BYTES):
                yield block
    except (EOFError, OSError, zlib.error) as error:
        yield RowProblem("unreadable_file", f"the file is truncated or corrupt ({error}): copy or download it again")


def _zstd_blocks(handle: BinaryIO) -> Iterator[bytes | RowProblem]:
    zstandard = import_library("zstandard", "a .zst file")
    try:
        yield from _decompressed_blocks(handle, lambda: zstandard.ZstdDecompressor().decompressobj())
    except zstandard.ZstdError as error:
        yield RowProblem("unreadable_file", f"the file is corrupt ({error}): copy or download it again")


def _decompressed_blocks(
    handle: BinaryIO, make_stream: Callable[[], Any], padding: bytes = b""
) -> Iterator[bytes | RowProblem]:
    """Yields the content of a file of one or several streams, with `padding` between them.

    The file objects of these libraries would lose the rows of the block in which a truncated file ends.
    """
    stream = make_stream()
    while block := handle.read(_BLOCK_BYTES):
        while block:
            yield stream.decompress(block) or b""
            block = stream.unused_data.lstrip(padding) if stream.eof else b""
            if stream.eof and block:
                stream = make_stream()
    if not stream.eof:
        yield RowProblem("unreadable_file", "the file is truncated: copy or download it again")


# Tables.


def _parquet_rows(file: Path) -> Iterator[Any]:
    arrow, parquet = import_library("pyarrow", "parquet"), import_library("pyarrow.parquet", "parquet")
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1000):
            yield from _read_batch_rows(batch)
    except (arrow.ArrowException, OSError) as error:
        yield _corrupt_table(error)


def _arrow_rows(file: Path) -> Iterator[Any]:
    arrow = import_library("pyarrow", "arrow")
    try:
        for batch in open_arrow(file):
            yield from _read_batch_rows(batch)
    except (arrow.ArrowException, OSError) as error:
        yield _corrupt_table(error)


_OUT_OF_RANGE = "<value out of range"
"""Start of the text to which arrow converts a date that it cannot represent as text."""


def _read_batch_rows(batch: Any) -> list[Any]:  # Any: pyarrow.RecordBatch
    """Returns the rows of a record batch, and a RowProblem for each row with text that is not UTF-8."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):
        if batch.num_rows > 1:
            half = batch.num_rows // 2
            return [*_read_batch_rows(batch.slice(0, half)), *_read_batch_rows(batch.slice(half))]
        return [_read_single_row(batch)]


def _read_single_row(batch: Any) -> RowProblem | dict[str, Any]:  # Any: pyarrow.RecordBatch
    """Returns the values of the only row of a batch. Dates that Python does not support become text or null."""
    arrow = import_library("pyarrow", "a table")
    values: dict[str, Any] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        try:
            values[name] = column[0].as_py()
        except UnicodeDecodeError as error:
            return RowProblem("invalid_utf8", f"{name} is not UTF-8 text ({error})")
        except (ValueError, OverflowError):  # nanoseconds without pandas, or a year after 9999
            try:
                text = column.cast(arrow.string())[0].as_py()
                values[name] = None if text.startswith(_OUT_OF_RANGE) else text
            except arrow.ArrowException:  # a list or an object that contains such a date
                values[name] = None
    return values


def _corrupt_table(error: Exception) -> RowProblem:
    reason = str(error).split("\n")[0]
    return RowProblem("unreadable_file", f"the file is truncated or corrupt ({reason}): copy or download it again")


def open_arrow(file: Path) -> Sequence[Any]:
    """Returns the record batches of an arrow file or stream, mapped into memory."""
    arrow, ipc = import_library("pyarrow", "arrow"), import_library("pyarrow.ipc", "arrow")
    mapped = arrow.memory_map(str(file))
    if mapped.read(6) == b"ARROW1":
        reader = ipc.open_file(mapped)
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    mapped.seek(0)
    return list(ipc.open_stream(mapped))


def _hub_rows(source: DataFile) -> Iterator[Any]:
    datasets = import_library("datasets", "a dataset of the Hugging Face Hub")
    try:
        rows = datasets.load_dataset(str(source.source), source.subset, split=source.split)
    except (OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"dataset {source.path} (subset {source.subset}, split {source.split}) cannot be loaded from the Hub "
            f"({str(error).splitlines()[0][:200]}): correct path, subset and split, or set a local file"
        ) from error
    yield from rows


def import_library(name: str, needed_by: str) -> Any:  # Any: a module
    """Imports a module of the extra `data`. Raises DataError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"{needed_by} needs the library {name.partition('.')[0]}, which is not installed: pip install "
            f"'flowrl[data]'"
        ) from error
