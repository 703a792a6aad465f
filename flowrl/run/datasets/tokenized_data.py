"""Tokenized rows of raw files and of prepared folders."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from flowrl.config import DataConfig, DataFile, ModelConfig
from flowrl.data.chat import ChatTokenizer
from flowrl.data.messages import Conversation, DataError
from flowrl.data.order.epoch_order import EpochOrder
from flowrl.data.preparation.prepared_folder import PreparedFolder, is_prepared
from flowrl.data.preparation.tokenized_rows import LengthLimits, TokenizedRow, tokenize_row
from flowrl.data.prompts import RESERVED_COLUMNS, too_long_error
from flowrl.data.reading import reader
from flowrl.data.reading.kinds import Kind
from flowrl.data.reading.row_problems import RowCounts, RowProblem
from flowrl.memory.model_fit import excess_tokens_message

MAX_UNKNOWN_FRACTION = 0.01
"""Fraction of unknown tokens in a dataset above which a warning is logged."""

_SHOWN_PARTS = 10
"""Largest number of unknown parts of texts in a warning."""

_logger = logging.getLogger(__name__)

Row = TypeVar("Row")


def read_tokenizer(model: ModelConfig, data: DataConfig | None = None) -> ChatTokenizer:
    """Returns the tokenizer of a model, with the conversation template of the data.

    Raises DataError if the tokenizer has no chat template or no end token.
    """
    tokenizer = ChatTokenizer(model.tokenizer_path, None if data is None else data.template, model=model.path)
    tokenizer.check_chat_template()
    return tokenizer


def check_context(tokenizer: ChatTokenizer, num_tokens: int, setting: str) -> None:
    """Raises DataError if `num_tokens` exceeds the maximum sequence length in the model's config."""
    limit = tokenizer.max_positions()
    if limit is not None and num_tokens > limit:
        raise DataError(excess_tokens_message(setting, num_tokens, tokenizer.path, limit))


class TokenizedData(Sequence[TokenizedRow]):
    """Tokenized rows of several files in the order of the files."""

    def __init__(
        self,
        rows: Sequence[TokenizedRow],
        parts: Sequence[tuple[int, float]],
        folders: Sequence[PreparedFolder] = (),
    ) -> None:
        """Stores the rows, (number of rows, weight) of each file, and the prepared folders of the rows, if any."""
        self._rows, self._parts, self._folders = rows, parts, folders

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:  # Any: a row for an int, a list for a slice, as `Sequence` declares
        return self._rows[index]

    def order(self, *, seed: int, shuffle: bool = True) -> EpochOrder:
        """Returns the order of the rows in every epoch."""
        return EpochOrder(self._parts, seed=seed, shuffle=shuffle)

    def first(self, num_rows: int | None) -> "TokenizedData":
        """Returns the first rows, or all if `num_rows` is None."""
        if num_rows is None or num_rows >= len(self):
            return self
        return TokenizedData([self[index] for index in range(num_rows)], [(num_rows, 1.0)])

    def has_column(self, name: str) -> bool:
        """Returns whether the rows have a column. Raises DataError if only some rows have it."""
        if self._folders:
            counts = [(int(folder.manifest["columns"].get(name, 0)), folder) for folder in self._folders]
            is_missing = [(count < len(folder), str(folder.path)) for count, folder in counts]
            has_any = any(count for count, _ in counts)
        else:
            rows = [row.conversation for row in self._rows]
            is_missing = [(row.columns.get(name) is None, row.location) for row in rows]
            has_any = not all(missing for missing, _ in is_missing)
        location = next((location for missing, location in is_missing if missing), None)
        if has_any and location is not None:
            raise DataError(f"{location}: {name} is missing, but other rows have it: add it, or remove it from all")
        return has_any


def read_rows(
    files: reader.Files,
    tokenizer: ChatTokenizer,
    kind: Kind,
    data: DataConfig,
    *,
    setting: str = "data.max_prompt_tokens",
    row_limit: int | None = None,
) -> TokenizedData:
    """Returns the tokenized rows of files or prepared folders.

    Args:
        files: a path, or files with weights and column mappings.
        tokenizer: tokenizer of the model.
        kind: kind of the rows, which must not be `prompts`.
        data: maximum number of tokens, and policies for invalid and long rows.
        setting: key of the maximum number of tokens, for error messages.
        row_limit: number of rows to keep, from the start; None keeps all.
    Raises:
        DataError: a row is invalid or too long, or a folder was prepared for other settings.
    """
    sources = reader.as_files(files)
    if prepared := open_prepared(sources, tokenizer, kind, data, setting):
        selected = [SelectedRows(folder, data.max_prompt_tokens) for folder, _ in prepared]
        parts = [(len(part), weight) for part, (_, weight) in zip(selected, prepared, strict=True)]
        if row_limit is None:
            check_weights(sources, parts)
        return TokenizedData(Concatenated(selected), parts, [folder for folder, _ in prepared]).first(row_limit)
    return _tokenize_files(sources, data, tokenizer, kind, setting, row_limit).first(row_limit)


def _tokenize_files(
    sources: Sequence[DataFile],
    data: DataConfig,
    tokenizer: ChatTokenizer,
    kind: Kind,
    setting: str,
    row_limit: int | None,
) -> TokenizedData:
    """Returns the tokenized rows of raw files. Warns about dropped rows. Raises DataError if no row remains."""
    limits = LengthLimits(data.max_prompt_tokens, data.too_long, setting=setting)
    allowed = frozenset() if data.too_long == "refuse" else frozenset({"too_long"})
    counts = RowCounts(strict=data.strict, allowed=allowed)
    conversations, parts = read_files(sources, data, kind)
    conversations = conversations[:row_limit]
    rows: list[TokenizedRow] = []
    num_rows: list[tuple[int, float]] = []
    start = 0
    for count, weight in parts:
        before = len(rows)
        for conversation in conversations[start : start + count]:
            counts.num_read += 1
            try:
                rows.append(tokenize_row(conversation, kind, tokenizer, limits))
            except RowProblem as problem:
                if problem.reason == "too_long" and data.too_long == "refuse":
                    raise too_long_error(conversation, problem) from problem
                counts.drop(problem, conversation.file, conversation.line)
        num_rows.append((len(rows) - before, weight))
        start += count
    if not rows:
        raise DataError(f"no row of {names_of(sources)} can be used: {counts.summary()}")
    if counts.num_dropped:
        _logger.warning("%s: %s", names_of(sources), counts.summary())
    if row_limit is None:
        check_weights(sources, num_rows)
    warn_of_unknown_tokens(conversations, tokenizer)
    return TokenizedData(rows, num_rows)


def read_files(
    sources: Sequence[DataFile], data: DataConfig, kind: Kind, needs: Sequence[str] = ()
) -> tuple[list[Conversation], tuple[tuple[int, float], ...]]:
    """Returns the conversations of raw files, and the number of conversations and the weight of each file."""
    conversations: list[Conversation] = []
    parts: list[tuple[int, float]] = []
    for source in sources:
        rows = reader.read_conversations(
            source,
            kind=kind,
            needs=needs,
            reserved=RESERVED_COLUMNS,
            trailing_assistant=data.trailing_assistant,
            ignored_message_keys=data.ignored_message_keys,
            strict=data.strict,
        )
        conversations += rows
        parts.append((len(rows), source.weight))
    return conversations, tuple(parts)


def check_weights(sources: Sequence[DataFile], parts: Sequence[tuple[int, float]]) -> None:
    """Raises DataError if the weight of a file is so small that an epoch has no row of the file.

    `parts` are the number of usable rows and the weight of each file.
    """
    for source, (num_rows, weight) in zip(sources, parts, strict=True):
        if num_rows and not round(num_rows * weight):
            raise DataError(
                f"the weight of {source.source} is {weight:g}, so an epoch has none of its {num_rows} rows: set a "
                f"weight of at least {1 / num_rows:.3g}, or remove the file"
            )


def names_of(files: Sequence[DataFile]) -> str:
    return ", ".join(str(file.source) for file in files)


# Prepared folders.


def open_prepared(
    sources: Sequence[DataFile],
    tokenizer: ChatTokenizer,
    kind: Kind,
    data: DataConfig,
    setting: str = "data.max_prompt_tokens",
) -> list[tuple[PreparedFolder, float]]:
    """Returns the prepared folders with their weights, or an empty list if the sources are raw files.

    Raises DataError if a folder has a different kind, tokenizer or template from the run, or if only some sources are
    prepared. Also raises it for rows that are too long, unless `data.too_long` is `drop`.
    """
    are_prepared = [is_prepared(source.source) for source in sources]
    if not any(are_prepared):
        return []
    if not all(are_prepared):
        raw = next(source.source for source, prepared in zip(sources, are_prepared, strict=True) if not prepared)
        raise DataError(f"{raw} is not a prepared folder, but other files of the same setting are: prepare {raw}, too")
    folders = []
    for source in sources:
        folder = PreparedFolder(source.source)
        if folder.kind != kind and not (kind == "text" and folder.kind == "sft"):
            raise DataError(
                f"the prepared folder {folder.path} has rows of kind {folder.kind}, but the run needs {kind}: prepare "
                f"the data with kind={kind}"
            )
        folder.check_tokenizer(tokenizer)
        folder.check_ids(tokenizer)
        longest = int(folder.manifest["lengths"]["max"])
        if longest > data.max_prompt_tokens and data.too_long != "drop":
            raise DataError(
                f"the prepared folder {folder.path} has rows of up to {longest} tokens, more than {setting} "
                f"({data.max_prompt_tokens}): prepare it with max_tokens={data.max_prompt_tokens}, set "
                f"data.too_long: drop, or raise {setting}"
            )
        if num_long := int((folder.lengths > data.max_prompt_tokens).sum()):
            problem = f"{num_long} of {len(folder)} rows dropped: more tokens than {setting} ({data.max_prompt_tokens})"
            if num_long == len(folder):
                raise DataError(f"no row of the prepared folder {folder.path} can be used: {problem}")
            _logger.warning("%s: %s", folder.path, problem)
        folders.append((folder, source.weight))
    return folders


class SelectedRows(Sequence[TokenizedRow]):
    """The rows of a prepared folder that are not too long."""

    def __init__(self, folder: PreparedFolder, max_tokens: int) -> None:
        self._folder = folder
        is_short = folder.lengths <= max_tokens
        self._indices = None if is_short.all() else np.flatnonzero(is_short)

    def __len__(self) -> int:
        return len(self._folder) if self._indices is None else len(self._indices)

    def __getitem__(self, index: Any) -> Any:  # Any: a row, for an int
        return self._folder[index if self._indices is None else self._indices[index]]


class Concatenated(Sequence[Row], Generic[Row]):
    """Several sequences of rows as one sequence, without copies."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:  # Any: a row, for an int
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]


# Unknown tokens.


@dataclass(frozen=True, slots=True)
class UnknownTokens:
    """Parts of a text that are not in the vocabulary of a tokenizer."""

    num_tokens: int
    """Number of tokens of the text. A dropped character counts as one token."""
    parts: tuple[str, ...]
    """One entry per unknown token."""


def find_unknown(tokenizer: ChatTokenizer, texts: Sequence[str]) -> list[UnknownTokens]:
    """Returns the parts of each text that the tokenizer replaces by its unknown token, or drops. White space never
    counts as dropped. If the tokenizer has no offsets (`is_fast` is false), dropped characters are not found, and each
    part is the text of the unknown token.
    """
    core: Any = tokenizer.tokenizer  # Any: transformers types token ids too loosely
    is_fast = core.is_fast
    encoded = core(list(texts), add_special_tokens=False, return_offsets_mapping=is_fast)
    unknown_id, unknown_token = core.unk_token_id, core.unk_token
    result = []
    for row, text in enumerate(texts):
        ids = encoded["input_ids"][row]
        if not is_fast:
            result.append(UnknownTokens(len(ids), (unknown_token,) * ids.count(unknown_id)))
            continue
        spans = encoded["offset_mapping"][row]
        replaced = [text[slice(*span)] for token, span in zip(ids, spans, strict=True) if token == unknown_id]
        covered = {position for span in spans for position in range(*span)}
        dropped = [c for position, c in enumerate(text) if position not in covered and not c.isspace()]
        result.append(UnknownTokens(len(ids) + len(dropped), (*replaced, *dropped)))
    return result


def warn_of_unknown_tokens(conversations: Sequence[Conversation], tokenizer: ChatTokenizer) -> None:
    """Logs a warning if more than `MAX_UNKNOWN_FRACTION` of the tokens of the messages are unknown."""
    texts = [
        (text, row)
        for row in conversations
        for text in (*(turn.content for turn in (*row.messages, *row.chosen, *row.rejected)), *(row.text or ()))
    ]
    parts_of_texts = {part for text, _ in texts for part in (*text, *text.split())}
    # Tokenizing the distinct characters and words is much faster than tokenizing the file again.
    if not any(unknown.parts for unknown in find_unknown(tokenizer, sorted(parts_of_texts))):
        return
    unknown_by_text = list(zip(find_unknown(tokenizer, [text for text, _ in texts]), texts, strict=True))
    num_unknown = sum(len(unknown.parts) for unknown, _ in unknown_by_text)
    num_tokens = sum(unknown.num_tokens for unknown, _ in unknown_by_text)
    if num_unknown <= MAX_UNKNOWN_FRACTION * num_tokens:
        return
    first = next(conversation for unknown, (_, conversation) in unknown_by_text if unknown.parts)
    parts = list(dict.fromkeys(part for unknown, _ in unknown_by_text for part in unknown.parts))
    more = f" and {len(parts) - _SHOWN_PARTS} more" if len(parts) > _SHOWN_PARTS else ""
    _logger.warning(
        "%.1f %% of the tokens in %s are unknown to the tokenizer in %s, first in line %d: the model does not receive "
        "%s%s; use another tokenizer, or remove them from the data",
        100 * num_unknown / num_tokens,
        first.file,
        tokenizer.path,
        first.line,
        ", ".join(map(repr, parts[:_SHOWN_PARTS])),
        more,
    )
