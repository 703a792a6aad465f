"""Prepares datasets: reads, filters, tokenizes and stores all rows, in several processes."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.config import PreparationConfig, RowsConfig
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.data.chat import ChatTokenizer
from flowrl.data.folders.atomic_folder import write_atomically
from flowrl.data.messages import Conversation, DataError
from flowrl.data.preparation.duplicates import NearDuplicates, SeenKeys, row_key, signature
from flowrl.data.preparation.folder_writer import FolderWriter
from flowrl.data.preparation.prepared_folder import encode_batch, template_hash, tokenizer_hash
from flowrl.data.preparation.tokenized_rows import LengthLimits, TokenizedRow, tokenize_row
from flowrl.data.prompts import RESERVED_COLUMNS
from flowrl.data.reading.kinds import Kind, infer_kind, select_turns
from flowrl.data.reading.raw_rows import RawChunk, data_files, read_chunks
from flowrl.data.reading.reader import check_columns, parse_rows
from flowrl.data.reading.row_problems import RowCounts, RowProblem
from flowrl.data.template import write_template

_ROWS_PER_CHUNK = 500
_FILTERS = frozenset({"duplicate", "near_duplicate", "too_short", "short_response", "long_response"})
"""Reasons of the filters. Filters drop rows on purpose, so these reasons do not stop a strict preparation."""


@dataclass(slots=True)
class PreparedChunk:
    """The usable rows of a chunk, in order."""

    batch: Any  # pyarrow.RecordBatch, or None if there is no row
    lines: list[str]
    """The rows as JSON."""
    locations: list[tuple[Path, int]]
    counts: RowCounts
    lengths: np.ndarray
    """int64 [rows], number of tokens of the longest side."""
    num_trained: np.ndarray
    """int64 [rows], number of trained tokens of all sides."""
    largest_ids: np.ndarray
    """int64 [rows], largest token id of each row."""
    columns: list[tuple[str, ...]]
    """Names of the columns of each row that are not null."""
    num_bytes: int
    keys: np.ndarray | None = None
    signatures: list[np.ndarray] = field(default_factory=list)


class ChunkPreparation:
    """Parses, filters and tokenizes chunks. Each process has its own instance."""

    def __init__(self, config: RowsConfig, kind: Kind) -> None:
        self._config = config
        self._kind: Kind = kind
        self.tokenizer = load_tokenizer(config)
        self._limits = LengthLimits(
            config.max_tokens,
            config.too_long,
            config.min_tokens,
            config.min_response_tokens,
            config.max_response_tokens,
        )
        allowed = _FILTERS if config.too_long == "refuse" else _FILTERS | {"too_long"}
        self._allowed = allowed

    def new_counts(self) -> RowCounts:
        """Returns counters. If the settings are strict, the counters raise DataError at the first invalid row."""
        return RowCounts(strict=self._config.strict, allowed=self._allowed)

    def __call__(self, chunk: RawChunk, columns: Mapping[str, str]) -> PreparedChunk:
        """Returns the usable rows of a chunk.

        Raises DataError for an invalid row in strict mode, and for a row that is too long if `too_long` is `refuse`.
        """
        counts = self.new_counts()
        rows = list(self.tokenize(chunk, columns, counts))
        config = self._config
        batch, lines = encode_batch(rows, self._kind) if rows else (None, [])
        conversations = [row.conversation for row in rows]
        counts.num_truncated = sum(row.is_truncated for row in rows)
        return PreparedChunk(
            batch,
            lines,
            [(row.file, row.line) for row in conversations],
            counts,
            np.array([row.length for row in rows], dtype=np.int64),
            np.array([sum(side.num_trained for side in row.sides) for row in rows], dtype=np.int64),
            np.array([max(side.ids.max(initial=0) for side in row.sides) for row in rows], dtype=np.int64),
            [tuple(name for name, value in row.columns.items() if value is not None) for row in conversations],
            chunk.num_bytes,
            np.array([row_key(row) for row in conversations], dtype=np.uint64) if config.duplicates == "drop" else None,
            [signature(row) for row in conversations] if config.near_duplicates is not None else [],
        )

    def _check(self, row: Conversation) -> Conversation:
        check_columns(row, (), RESERVED_COLUMNS)
        return select_turns(row, self._kind, trailing_assistant=self._config.trailing_assistant)

    def tokenize(self, chunk: RawChunk, columns: Mapping[str, str], counts: RowCounts) -> Iterator[TokenizedRow]:
        """Yields the usable rows of a chunk, and counts all rows."""
        ignored = self._config.ignored_message_keys
        for row in parse_rows(chunk, columns, counts, self._check, self._kind, ignored):
            try:
                yield tokenize_row(row, self._kind, self.tokenizer, self._limits, turns=self._config.turns)
            except RowProblem as problem:
                if problem.reason == "too_long" and self._config.too_long == "refuse":
                    raise DataError(f"{row.location}: {problem}, or set too_long: drop") from problem
                counts.drop(problem, row.file, row.line)


def load_tokenizer(config: RowsConfig) -> ChatTokenizer:
    """Returns the tokenizer with the template of the settings. Ignores a template file that does not exist.

    Raises DataError if the settings have no tokenizer, or if it has no chat template.
    """
    if config.tokenizer is None:
        raise DataError("tokenizer is not set: set tokenizer=FOLDER to the folder of the model")
    exists = config.template is not None and config.template.exists()
    tokenizer = ChatTokenizer(config.tokenizer, config.template if exists else None)
    tokenizer.check_chat_template()
    return tokenizer


_preparation: ChunkPreparation | None = None
"""Preparation of a worker process."""


def _start_process(config: PreparationConfig, kind: Kind) -> None:
    global _preparation
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _preparation = ChunkPreparation(config, kind)


def _prepare_in_process(chunk: RawChunk, columns: Mapping[str, str]) -> PreparedChunk:
    assert _preparation is not None
    return _preparation(chunk, columns)


def prepare(config: PreparationConfig, report: Callable[[int, int], None] | None = None) -> Mapping[str, Any]:
    """Creates the prepared folder, and returns its manifest.

    Args:
        config: the settings. The folder does not depend on `processes`.
        report: receives the numbers of bytes and rows that were read since the last call.
    Raises:
        DataError: the folder exists, no row can be used, or the settings refuse a row.
    """
    if config.output.exists():
        raise DataError(f"output {config.output} already exists: choose another folder, or delete it")
    tokenizer = load_tokenizer(config)
    template = tokenizer.template
    if config.template is not None and not config.template.exists():
        write_template(config.template, template)
    kind = find_kind(config)
    with write_atomically(config.output) as folder, FolderWriter(folder, config.rows_per_shard) as writer:
        _write_rows(config, kind, writer, report)
        if not writer.num_rows:
            raise no_row_error(config, writer.counts)
        write_template(folder / TEMPLATE_FILE, template)
        return writer.finish(
            kind=kind,
            tokenizer=str(config.tokenizer),
            tokenizer_hash=tokenizer_hash(tokenizer),
            template_hash=template_hash(tokenizer),
            settings=config.model_dump(mode="json", exclude={"processes", "output"}),
        )


def find_kind(config: RowsConfig) -> Kind:
    """Returns the kind in the settings, or else the kind of the first row with a known shape.

    Raises DataError if no row has a known shape, and in strict mode at the first invalid row.
    """
    if config.kind is not None:
        return config.kind
    counts = RowCounts(strict=config.strict)
    for source in config.files:
        for chunk in read_chunks(source, rows_per_chunk=100, max_row_bytes=round(config.max_row_mb * (1 << 20))):
            for row in parse_rows(chunk, source.columns, counts, ignored_message_keys=config.ignored_message_keys):
                return infer_kind(row)
    raise no_row_error(config, counts)


def no_row_error(config: RowsConfig, counts: RowCounts) -> DataError:
    """Returns the error for files without a usable row."""
    names = ", ".join(str(file.source) for file in config.files)
    if not counts.num_read:
        return DataError(f"there are no rows in {names}: write one conversation per line (docs/data.md)")
    return DataError(f"no row of {names} can be used: {counts.summary()}")


def _write_rows(
    config: PreparationConfig, kind: Kind, writer: FolderWriter, report: Callable[[int, int], None] | None
) -> None:
    seen = SeenKeys() if config.duplicates == "drop" else None
    near = None if config.near_duplicates is None else NearDuplicates(config.near_duplicates)
    with _chunk_results(config, kind) as results:
        for chunk in results:
            is_kept = np.ones(len(chunk.lines), dtype=bool)
            if seen is not None and chunk.keys is not None:
                is_kept = seen.add(chunk.keys)
                _count_dropped(chunk, ~is_kept, RowProblem("duplicate", "an earlier row has the same messages"))
            if near is not None:
                is_new = near.add(chunk.signatures, is_kept)
                _count_dropped(
                    chunk, is_kept & ~is_new, RowProblem("near_duplicate", "an earlier row has almost the same text")
                )
                is_kept = is_new
            writer.write(chunk, is_kept)
            if report is not None:
                report(chunk.num_bytes, chunk.counts.num_read)


def _count_dropped(chunk: PreparedChunk, is_dropped: np.ndarray, problem: RowProblem) -> None:
    for index in np.flatnonzero(is_dropped):
        chunk.counts.drop(problem, *chunk.locations[index])


@contextmanager
def _chunk_results(config: PreparationConfig, kind: Kind) -> Iterator[Iterator[PreparedChunk]]:
    """Yields the prepared chunks of all files in their order."""
    max_bytes = round(config.max_row_mb * (1 << 20))
    chunks = (
        (chunk, source.columns)
        for source in config.files
        for chunk in read_chunks(source, rows_per_chunk=_ROWS_PER_CHUNK, max_row_bytes=max_bytes)
    )
    if config.processes == 1:
        preparation = ChunkPreparation(config, kind)
        yield (preparation(chunk, columns) for chunk, columns in chunks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        config.processes, mp_context=context, initializer=_start_process, initargs=(config, kind)
    ) as pool:
        try:
            yield _in_order(pool, chunks, 2 * config.processes + 2)
        except BrokenProcessPool as error:
            raise DataError(
                f"a process of the preparation ended unexpectedly, for example because of too little memory: reduce "
                f"processes ({config.processes}), and start the preparation again"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterator[tuple[RawChunk, Mapping[str, str]]], max_in_flight: int
) -> Iterator[PreparedChunk]:
    in_flight: deque[Future[PreparedChunk]] = deque()
    for chunk, columns in chunks:
        in_flight.append(pool.submit(_prepare_in_process, chunk, columns))
        if len(in_flight) >= max_in_flight:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()


def total_bytes(config: RowsConfig) -> int | None:
    """Returns the size of all files, or None if the number of bytes read is unknown, as with parquet, arrow and the
    Hub.
    """
    files = [file for source in config.files for file in data_files(source)]
    if any(not file.is_file() or file.suffix in (".parquet", ".arrow") for file in files):
        return None
    return sum(file.stat().st_size for file in files)
