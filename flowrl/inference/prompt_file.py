"""Reads the prompts of `flowrl generate`: lines of text, JSON lines, a table, or standard input."""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from flowrl.config.source import find_file_problem
from flowrl.data.messages import Conversation, DataError, Message
from flowrl.data.reading.kinds import select_turns
from flowrl.data.reading.raw_rows import RawChunk
from flowrl.data.reading.reader import parse_rows, read_conversations
from flowrl.data.reading.row_problems import RowCounts
from flowrl.data.template import naming_row

if TYPE_CHECKING:
    from flowrl.data.chat import ChatTokenizer  # imports transformers

STDIN = "-"
"""Name of standard input."""

_TABLES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".gz", ".zst")
"""Suffixes of the names of files that are not lines of text."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt with its tokens."""

    conversation: Conversation
    token_ids: tuple[int, ...]
    max_tokens: int
    """Maximum number of tokens of a response."""


def read_prompt_rows(
    source: str, stdin: BinaryIO, *, system: str | None = None, reserved: frozenset[str] = frozenset()
) -> list[Conversation]:
    """Returns the prompts of a file, in the order of the file.

    A file whose first line is a JSON object has JSON lines, in one of the shapes of docs/data.md. In other text files,
    each line that is not blank is a prompt.

    Args:
        source: path of a file or folder, or `-` for standard input.
        stdin: standard input.
        system: system message of conversations that have none.
        reserved: names that no column may have.
    Raises DataError if the file is missing, empty or invalid.
    """
    path = Path(source)
    if source != STDIN and (path.is_dir() or path.suffix.lower() in _TABLES):
        rows = read_conversations(path, kind="prompts")
    else:
        rows = _parse_lines(_read_bytes(source, stdin), Path("standard input") if source == STDIN else path)
    for row in rows:
        if name := next((name for name in row.columns if name in reserved), None):
            raise DataError(
                f"{row.location}: column {name!r} has the name of a column of the output: rename it in the file"
            )
    if system is None:
        return rows
    first = Message("system", system)
    return [row if row.messages[0].role == "system" else replace(row, messages=(first, *row.messages)) for row in rows]


def _read_bytes(source: str, stdin: BinaryIO) -> bytes:
    if source == STDIN:
        return stdin.read()
    if problem := find_file_problem(Path(source), max_mb=None):
        raise DataError(f"prompts cannot be read from {source}: it {problem}, or - for standard input")
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise DataError(f"prompts cannot be read from {source} ({error.strerror}): correct the path") from error


def _parse_lines(content: bytes, name: Path) -> list[Conversation]:
    lines = content.removeprefix(codecs.BOM_UTF8).splitlines()
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise DataError(f"{name} has no prompts: write one per line")
    if _is_json_object(first):
        chunk, counts = RawChunk(name, 1, list(lines)), RowCounts(strict=True)
        return list(parse_rows(chunk, {}, counts, lambda row: select_turns(row, "prompts"), "prompts"))
    try:
        texts = [line.decode() for line in lines]
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}): convert it") from error
    return [
        Conversation((Message("user", text.strip()),), file=name, line=number)
        for number, text in enumerate(texts, start=1)
        if text.strip()
    ]


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def tokenize_rows(
    rows: Sequence[Conversation],
    chat: "ChatTokenizer",
    *,
    max_length: int,
    max_tokens: int,
    can_shorten: bool = False,
    is_raw: bool,
) -> list[PromptRow]:
    """Returns the prompts with their tokens.

    Args:
        rows: the prompts.
        chat: tokenizer and chat template of the model.
        max_length: maximum number of tokens of prompt and response together.
        max_tokens: maximum number of tokens of a response.
        can_shorten: lowers the limit of a response (to at least 1) if a long prompt leaves fewer than `max_tokens`.
        is_raw: uses the text of a prompt without the chat template. The model continues the text.
    Raises DataError if a prompt is too long, or if the chat template is missing or rejects a prompt.
    """
    if not is_raw:
        try:
            chat.check_chat_template()
        except DataError as error:
            raise DataError(f"{error}; or continue the text of the prompts without a chat template (--raw)") from error
    prompts = [(row, _encode(row, chat, is_raw=is_raw)) for row in rows]
    return [
        PromptRow(row, ids, _limit_response(row, len(ids), max_length, max_tokens, can_shorten)) for row, ids in prompts
    ]


def _encode(row: Conversation, chat: "ChatTokenizer", *, is_raw: bool) -> tuple[int, ...]:
    if is_raw and len(row.messages) > 1:
        raise DataError(
            f"{row.location}: the prompt has {len(row.messages)} messages, which need a chat template: remove --raw, "
            f"or use one message per prompt"
        )
    try:
        with naming_row(row.location):
            ids = chat.encode_text(row.messages[0].content)[0] if is_raw else chat.encode_prompt(row.messages)  # pyright: ignore[reportGeneralTypeIssues] (a prompt has a message)
    except DataError as error:
        raise DataError(f"{row.location}: {error}") from error
    if not ids:
        raise DataError(f"{row.location}: the tokenizer has no tokens for the prompt: write another text")
    return tuple(ids)


def _limit_response(row: Conversation, num_tokens: int, max_length: int, max_tokens: int, can_shorten: bool) -> int:
    """Returns the maximum number of tokens of the response to a prompt of `num_tokens` tokens."""
    if can_shorten:
        if num_tokens >= max_length:
            raise DataError(
                f"{row.location}: the prompt has {num_tokens} tokens, which leaves none for a response (the model's "
                f"limit is {max_length}): shorten the prompt"
            )
        return min(max_tokens, max_length - num_tokens)
    if num_tokens + max_tokens > max_length:
        raise DataError(
            f"{row.location}: the prompt has {num_tokens} tokens, {num_tokens + max_tokens} with --max-tokens "
            f"{max_tokens} (above the model's limit of {max_length}): shorten the prompt, or lower --max-tokens"
        )
    return max_tokens
