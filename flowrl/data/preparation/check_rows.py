"""Checks and shows rows of raw files and of prepared folders, without writing files."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path

from rich.text import Text

from flowrl.config import DataFile, RowsConfig
from flowrl.data.chat import ChatTokenizer
from flowrl.data.checksums import checksum_of
from flowrl.data.messages import Conversation, DataError
from flowrl.data.preparation.prepare import ChunkPreparation, find_kind
from flowrl.data.preparation.prepared_folder import SIDES, PreparedFolder, is_prepared
from flowrl.data.preparation.tokenized_rows import TokenizedRow, Tokens
from flowrl.data.prompts import RESERVED_COLUMNS
from flowrl.data.reading.kinds import Kind, select_turns
from flowrl.data.reading.raw_rows import read_chunks
from flowrl.data.reading.reader import check_columns, parse_rows
from flowrl.data.reading.row_problems import RowCounts
from flowrl.data.template import read_own_template


def check_rows(config: RowsConfig) -> tuple[Kind, RowCounts]:
    """Reads all rows, and tokenizes them if the settings have a tokenizer. Returns their kind and counts.

    Raises DataError if a prepared folder is corrupt, and in strict mode at the first invalid row.
    """
    prepared = [source.path for source in config.files if source.path is not None and is_prepared(source.path)]
    if prepared:
        return _check_prepared(config, prepared)
    kind = find_kind(config)
    if config.tokenizer is not None:
        preparation = ChunkPreparation(config, kind)
        counts = preparation.new_counts()
        for source in config.files:
            for chunk in read_chunks(source, max_row_bytes=round(config.max_row_mb * (1 << 20))):
                for _ in preparation.tokenize(chunk, source.columns, counts):
                    pass
        return kind, counts
    counts = RowCounts(strict=config.strict)

    def check(row: Conversation) -> Conversation:
        check_columns(row, (), RESERVED_COLUMNS)
        return select_turns(row, kind, trailing_assistant=config.trailing_assistant)

    for source in config.files:
        for chunk in read_chunks(source, max_row_bytes=round(config.max_row_mb * (1 << 20))):
            for _ in parse_rows(chunk, source.columns, counts, check, kind, config.ignored_message_keys):
                pass
    return kind, counts


def _check_prepared(config: RowsConfig, paths: Sequence[Path]) -> tuple[Kind, RowCounts]:
    """Returns the kind and the counts of prepared folders. Raises DataError if a shard does not match its checksum."""
    if len(paths) < len(config.files):
        raise DataError(f"{paths[0]} is a prepared folder, but other files are not: check them separately")
    folders = [PreparedFolder(path) for path in paths]
    for folder in folders:
        for shard in folder.manifest["shards"]:
            path = folder.path / shard["file"]
            checksum = checksum_of(path)
            if (checksum.size, checksum.crc32) != (shard["bytes"], shard["crc32"]):
                raise DataError(f"{path} differs from its checksum in the manifest: prepare the data again")
    return folders[0].kind, RowCounts(num_read=sum(map(len, folders)))


def first_rows(config: RowsConfig, *, start: int, count: int) -> tuple[Kind, list[TokenizedRow], ChatTokenizer]:
    """Returns `count` usable rows from row `start` on, their kind, and the tokenizer.

    If the setting `tokenizer` is null, a prepared folder is shown with the tokenizer in its manifest.
    """
    source: DataFile = config.files[0]
    if source.path is not None and is_prepared(source.path):
        folder = PreparedFolder(source.path)
        model = config.tokenizer or folder.manifest["tokenizer"]
        tokenizer = ChatTokenizer(model, config.template or read_own_template(source.path))
        return folder.kind, folder[start : start + count], tokenizer
    kind = find_kind(config)
    preparation = ChunkPreparation(config, kind)
    counts = preparation.new_counts()
    rows = (
        row
        for file in config.files
        for chunk in read_chunks(file, rows_per_chunk=100)
        for row in preparation.tokenize(chunk, file.columns, counts)
    )
    return kind, list(islice(rows, start, start + count)), preparation.tokenizer


TRAINED_STYLE = "bold green"
_OPEN, _CLOSE = "[[", "]]"


def marked_text(tokens: Tokens, tokenizer: ChatTokenizer) -> str:
    """Returns the text of tokens, with trained tokens between [[ and ]]."""
    parts = (f"{_OPEN}{text}{_CLOSE}" if trained else text for text, trained in _mask_runs(tokens, tokenizer))
    return "".join(parts)


def render_rows(
    rows: Sequence[TokenizedRow], kind: Kind, tokenizer: ChatTokenizer, *, has_colors: bool
) -> Iterator[Text]:
    """Yields a heading and the text of each row. Trained tokens are colored, or between [[ and ]] without colors."""
    for row in rows:
        yield Text(f"{row.conversation.location} ({row.length} tokens)", style="bold")
        for name, side in zip(SIDES[kind], row.sides, strict=True):
            if len(row.sides) > 1:
                yield Text(f"{name}:", style="italic")
            if not has_colors:
                yield Text(marked_text(side, tokenizer))
                continue
            yield Text.assemble(
                *((text, TRAINED_STYLE if trained else "") for text, trained in _mask_runs(side, tokenizer))
            )
        if columns := {name: value for name, value in row.conversation.columns.items() if value is not None}:
            yield Text(f"columns: {columns}", style="dim")
        yield Text("")


def _mask_runs(tokens: Tokens, tokenizer: ChatTokenizer) -> Iterator[tuple[str, bool]]:
    """Yields (text, mask value) of each run of tokens with the same mask value. Keeps special tokens."""
    pairs = zip(tokens.ids.tolist(), tokens.mask.tolist(), strict=True)
    for trained, group in groupby(pairs, key=lambda pair: pair[1]):
        yield tokenizer.decode_all([token for token, _ in group]), trained
