"""Tokens and training mask of a row of any kind, within length limits."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flowrl.data.chat import ChatTokenizer, MissingEmbeddingError
from flowrl.data.messages import Conversation, DataError
from flowrl.data.prompts import tokenize_prompt
from flowrl.data.reading.kinds import Kind
from flowrl.data.reading.row_problems import RowProblem
from flowrl.data.template import naming_row


@dataclass(frozen=True)
class LengthLimits:
    """Limits of the number of tokens of a row, or of each side of a preference pair."""

    max_tokens: int | None = None
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    min_tokens: int = 0
    min_response_tokens: int = 0
    max_response_tokens: int | None = None
    setting: str = "max_tokens"
    """Name of the setting of `max_tokens`, for error messages."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a prompt, a conversation or a text."""

    ids: np.ndarray
    """int32 [T]."""
    mask: np.ndarray
    """bool [T], true for trained tokens, which enter the loss. Always false for the first token, and for all tokens of
    a prompt.
    """

    @property
    def num_trained(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A row and its tokens, with one side, or two sides (chosen and rejected)."""

    conversation: Conversation
    sides: tuple[Tokens, ...]
    is_truncated: bool = False

    @property
    def length(self) -> int:
        """Number of tokens of the longest side."""
        return max(len(side.ids) for side in self.sides)


def tokenize_row(
    row: Conversation,
    kind: Kind,
    tokenizer: ChatTokenizer,
    limits: LengthLimits,
    *,
    turns: Literal["all", "last"] = "all",
) -> TokenizedRow:
    """Returns the tokens of a row that `kinds.select_turns` returned.

    Raises RowProblem if the chat template rejects the row, or if its length violates the limits.
    """
    try:
        if kind == "prompts":
            prompt = tokenize_prompt(row, tokenizer, limits.max_tokens, limits.too_long, limits.setting)
            side = Tokens(prompt.ids, np.zeros(len(prompt.ids), dtype=bool))
            is_truncated = prompt.conversation.messages != row.messages
            tokenized = TokenizedRow(prompt.conversation, (side,), is_truncated)
        else:
            with naming_row(row.location):
                sides = tuple(_encode_sides(row, kind, tokenizer, turns))
            tokenized = _truncate(TokenizedRow(row, sides), limits)
    except MissingEmbeddingError as error:
        raise RowProblem("no_embedding", str(error)) from error
    except DataError as error:
        raise RowProblem("template", str(error)) from error
    _check_lengths(tokenized, limits, has_response=kind != "prompts")
    return tokenized


def _encode_sides(
    row: Conversation, kind: Kind, tokenizer: ChatTokenizer, turns: Literal["all", "last"]
) -> list[Tokens]:
    if row.text is not None:
        prefix, text = row.text
        ids, mask = tokenizer.encode_text(prefix + text, [(len(prefix), len(prefix) + len(text))])
        has_end = ids[-1:] == [tokenizer.eos_id]
        return [_tokens(ids, mask) if has_end else _tokens([*ids, tokenizer.eos_id], [*mask, True])]
    if kind in ("sft", "text"):
        first = len(row.messages) - 1 if turns == "last" else 0
        return [_tokens(*tokenizer.encode_example(row.messages, first))]
    continuations = (row.chosen, row.rejected) if kind == "preference" else (row.chosen,)
    # Only the last turn of a continuation enters the loss, as in ColossalChat.
    return [
        _tokens(*tokenizer.encode_example((*row.messages, *added), len(row.messages) + len(added) - 1))
        for added in continuations
    ]


def _tokens(ids: list[int], mask: list[bool]) -> Tokens:
    tokens = Tokens(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=bool))
    tokens.mask[:1] = False  # No token precedes the first token, so the model cannot predict it.
    return tokens


def _truncate(row: TokenizedRow, limits: LengthLimits) -> TokenizedRow:
    """Drops the end of a long row. Raises RowProblem if `too_long` forbids this, or if no trained token remains."""
    limit = limits.max_tokens
    if limit is None or row.length <= limit:
        return row
    cut = tuple(Tokens(side.ids[:limit], side.mask[:limit]) for side in row.sides)
    if limits.too_long != "truncate" or not all(side.num_trained for side in cut):
        what = "prompt" if limits.too_long == "truncate" else "conversation"
        raise RowProblem(
            "too_long",
            f"the {what} has {row.length} tokens, more than {limits.setting} ({limit}): shorten it, or raise "
            f"{limits.setting}",
        )
    return replace(row, sides=cut, is_truncated=True)


def _check_lengths(row: TokenizedRow, limits: LengthLimits, *, has_response: bool) -> None:
    shortest = min(len(side.ids) for side in row.sides)
    if shortest < limits.min_tokens:
        raise RowProblem("too_short", f"the row has {shortest} tokens, less than min_tokens ({limits.min_tokens})")
    if not has_response:
        return
    counts = [side.num_trained for side in row.sides]
    if not min(counts):
        raise RowProblem("no_answer", "the row has no trained tokens")
    if min(counts) < limits.min_response_tokens:
        raise RowProblem(
            "short_response",
            f"the response has {min(counts)} tokens, less than min_response_tokens ({limits.min_response_tokens})",
        )
    if limits.max_response_tokens is not None and max(counts) > limits.max_response_tokens:
        raise RowProblem(
            "long_response",
            f"the response has {max(counts)} tokens, more than max_response_tokens ({limits.max_response_tokens})",
        )
