"""Renders tokenized rows with their training mask, for inspection."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from flowrl.data.chat import ChatTokenizer
from flowrl.data.preparation.prepared_folder import SIDES
from flowrl.data.preparation.tokenized_rows import TokenizedRow, Tokens
from flowrl.data.reading.kinds import Kind

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
