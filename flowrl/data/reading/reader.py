"""Reads all rows of several files as conversations."""

import codecs
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flowrl.config import DataFile
from flowrl.data.messages import Conversation, DataError
from flowrl.data.reading.json_values import parse_strictly, to_json_columns
from flowrl.data.reading.kinds import Kind, select_turns, split_pair
from flowrl.data.reading.raw_rows import RawChunk, read_chunks
from flowrl.data.reading.row_problems import RowCounts, RowProblem
from flowrl.data.reading.shapes import find_absent, parse_row

_logger = logging.getLogger(__name__)

Files = Path | str | DataFile | Sequence[DataFile]
"""A path, or files with their column mappings."""

RowCheck = Callable[[Conversation], Conversation]
"""Converts or checks a conversation. Raises RowProblem for a conversation that must be dropped."""


def parse_rows(
    chunk: RawChunk,
    columns: Mapping[str, str],
    counts: RowCounts,
    check: RowCheck | None = None,
    kind: Kind | None = None,
    ignored_message_keys: Collection[str] = (),
) -> Iterator[Conversation]:
    """Yields the conversations of a chunk, and counts its rows.

    `check` may convert or drop each conversation. For kto, a pair yields two conversations. The keys
    `ignored_message_keys` of turns are ignored.
    """
    for line, raw in enumerate(chunk.rows, start=chunk.first_line):
        counts.num_read += 1
        values = None
        try:
            if isinstance(raw, RowProblem):
                raise raw
            values = _parse_json(raw) if isinstance(raw, bytes) else raw
            conversation = parse_row(values, columns, chunk.file, line, ignored_message_keys)
            conversation = replace(conversation, columns=to_json_columns(conversation.columns))
            for part in split_pair(conversation, kind):
                yield part if check is None else check(part)
        except RowProblem as problem:
            counts.drop(_name_absent_keys(problem, values, columns), chunk.file, line)


_REASONS_OF_ABSENT_KEYS = ("unknown_shape", "no_prompt", "no_answer", "missing_column")


def _name_absent_keys(problem: RowProblem, row: Any, columns: Mapping[str, str]) -> RowProblem:  # Any: any JSON value
    """Returns the problem of a row. If the row lacks keys in `columns`, the message begins with these keys."""
    absent = find_absent(row, columns)
    if not absent or problem.reason not in _REASONS_OF_ABSENT_KEYS:
        return problem
    names = ", ".join(f"{name}: {source}" for name, source in absent.items())
    keys = ", ".join(map(str, row))[:200] or "none"
    return RowProblem(
        problem.reason, f"`columns` has {names}, which is not a key of the row (its keys: {keys}); {problem}"
    )


def _parse_json(line: bytes) -> Any:  # Any: any JSON value
    if not line.strip():
        raise RowProblem("invalid_json", "the line is empty; write one JSON object per line")
    try:
        text = line.decode().rstrip(_JSON_SPACE)
        value, end = parse_strictly(text, len(text) - len(text.lstrip(_JSON_SPACE)))
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return value
    except UnicodeDecodeError as error:
        raise RowProblem("invalid_utf8", f"the row is not UTF-8 text, {_encoding_problem(line, error)}") from error
    except json.JSONDecodeError as error:
        if b"\0" in line:
            raise RowProblem("invalid_json", f"the row is not JSON, {_BINARY}") from error
        reason = error.msg.removesuffix(" starting at")  # json's own message continues with the position
        raise RowProblem("invalid_json", f"not valid JSON (column {error.colno}: {reason})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of nested lists
        raise RowProblem("invalid_json", f"not valid JSON ({error})") from error


_JSON_SPACE = " \t\r\n"
_BINARY = "but binary data or UTF-16: save the file as JSON lines in UTF-8 (docs/data.md lists the formats)"


def _encoding_problem(line: bytes, error: UnicodeDecodeError) -> str:
    """Returns a message with the probable format of a row that is not UTF-8, and the fix."""
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "but UTF-16: convert the file to UTF-8"
    if b"\0" in line:
        return _BINARY
    return f"because of the byte 0x{line[error.start]:02x} at {error.start}: convert the file to UTF-8"


def read_conversations(
    files: Files,
    *,
    last: Literal["user", "assistant"] | None = None,
    needs: Sequence[str] = (),
    reserved: frozenset[str] = frozenset(),
    kind: Kind | None = None,
    trailing_assistant: Literal["refuse", "drop"] = "refuse",
    ignored_message_keys: Collection[str] = (),
    strict: bool = True,
    max_row_bytes: int = 8 << 20,
) -> list[Conversation]:
    """Reads all rows of files as conversations, in the order of the files.

    Args:
        files: a path, or files with their column mappings.
        last: required role of the last message: `user` for kind `prompts`, `assistant` for `sft`.
        needs: required columns, such as `answer`.
        reserved: names that no column may have.
        kind: the kind of training whose turns are kept. If None, all turns are kept.
        trailing_assistant: whether to refuse or to shorten a prompt that ends with the assistant.
        ignored_message_keys: keys of turns that are not read.
        strict: if True, raises an error at the first row with a problem. If False, drops and counts these rows.
        max_row_bytes: largest size of a JSON line.
    Raises:
        DataError: a file is missing, no row can be used, or a row has a problem and `strict` is true.
    """
    kind = kind or {"user": "prompts", "assistant": "sft", None: None}[last]

    def check(row: Conversation) -> Conversation:
        check_columns(row, needs, reserved)
        return row if kind is None else select_turns(row, kind, trailing_assistant=trailing_assistant)

    sources = as_files(files)
    counts = RowCounts(strict=strict)
    conversations = [
        conversation
        for source in sources
        for chunk in read_chunks(source, max_row_bytes=max_row_bytes)
        for conversation in parse_rows(chunk, source.columns, counts, check, kind, ignored_message_keys)
    ]
    names = ", ".join(str(source.source) for source in sources)
    if not counts.num_read:
        raise DataError(f"dataset {names} is empty; write one conversation per line")
    if not conversations:
        raise DataError(f"no row of {names} can be used: {counts.summary()}")
    if counts.num_dropped:
        _logger.warning("%s: %s", names, counts.summary())
    return conversations


def count_rows(files: Files, kind: Kind | None = None, ignored_message_keys: Collection[str] = ()) -> int | None:
    """Returns the number of rows of an epoch in local files, without tokenizing them, or None if a source is not a
    local file.

    Rows that a run drops, such as long rows, are counted. For kto, a pair counts as two rows.
    """
    num_rows = 0
    for source in as_files(files):
        if source.path is None:
            num_rows += round(source.rows * source.weight)
            continue
        if not source.path.exists():
            return None
        chunks, counts = read_chunks(source), RowCounts()
        usable = sum(
            1
            for chunk in chunks
            for _ in parse_rows(chunk, source.columns, counts, kind=kind, ignored_message_keys=ignored_message_keys)
        )
        num_rows += round(usable * source.weight)
    return num_rows


def as_files(files: Files) -> tuple[DataFile, ...]:
    """Returns the files with their settings."""
    if isinstance(files, Path | str):
        return (DataFile(path=Path(files)),)
    return (files,) if isinstance(files, DataFile) else tuple(files)


def check_columns(row: Conversation, needs: Sequence[str], reserved: frozenset[str]) -> None:
    """Raises RowProblem if a column has a reserved name, or if a column in `needs` is missing."""
    for name in row.columns:
        if name in reserved:
            raise RowProblem(
                "reserved_column",
                f"column {name!r} is reserved for the run: rename it in the file, or set columns: "
                f"{{data_{name}: {name}}}",
            )
    for name in needs:
        if row.columns.get(name) is None:
            others = ", ".join(key for key in row.columns if key != name)
            raise RowProblem(
                "missing_column",
                f"{name!r} is missing or null, but the reward or environment function has a parameter {name} without a "
                f"default: add {name} next to 'messages', rename the parameter to prompt, response, conversation or a "
                f"key of this line ({others or 'no other'}), or give it a default",
            )
