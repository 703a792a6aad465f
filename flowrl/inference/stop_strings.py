"""Finds stop strings in the text of a response, also if they span tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.data.chat import ChatTokenizer

_INCOMPLETE = "\ufffd"
"""Character that stands for the bytes of an incomplete character."""

_MAX_BYTES = 4
"""Bytes of the longest character in UTF-8. A token may be one byte, so a character may have this number of tokens."""

_SPARE_TOKENS = 8
"""Number of tokens that are searched in addition, because special tokens have no text."""


@dataclass(frozen=True)
class StopMatch:
    """The first stop string in a response."""

    num_tokens: int
    """Number of tokens up to the end of the stop string."""
    text: str
    """Text before the stop string."""


class StopStrings:
    """Texts that end a response. They are searched without special tokens, unless a text contains a special token."""

    def __init__(self, chat: ChatTokenizer, texts: Sequence[str]) -> None:
        self._chat, self._texts = chat, tuple(texts)
        self._num_recent = _MAX_BYTES * max(map(len, self._texts), default=0) + _SPARE_TOKENS
        ends = (chat.decode(ids) for ids in chat.stop_ids if len(ids) > 1)
        self._held = (*self._texts, *(text for text in ends if text))
        """Texts that end a response. A prefix of such a text at the end of a response is not settled."""
        special = [token for token in map(str, chat.tokenizer.all_special_tokens) if token]
        self._has_special = any(token in text for text in self._texts for token in special)

    def find(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Returns the first stop string in the text of the tokens, or None.

        If the same token completes several strings, returns the string that begins first.
        """
        if not self._texts or not self._contains(self._decode(token_ids)):
            return None
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._contains(self._decode(token_ids[:middle])) else (middle + 1, high)
        return StopMatch(low, self.cut(self._decode(token_ids[:low])))

    def cut(self, text: str) -> str:
        """Returns the text before the first stop string."""
        return text[: min((position for position in map(text.find, self._texts) if position >= 0), default=len(text))]

    def can_contain(self, token_ids: Sequence[int], num_searched: int) -> bool:
        """Returns whether a stop string may end after the first `num_searched` tokens. False may be wrong if more than
        `_SPARE_TOKENS` special tokens are within the stop string.
        """
        recent = token_ids[max(0, num_searched - self._num_recent) :]
        return bool(self._texts) and self._contains(self._decode(recent))

    def settled_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text that later tokens cannot change: without an incomplete character at the end, and without the
        start of a stop string.
        """
        text = self._decode(token_ids).rstrip(_INCOMPLETE)
        held = max((_overlap(text, stop) for stop in self._held), default=0)
        return text[: len(text) - held]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._chat.decode_all(token_ids) if self._has_special else self._chat.decode(token_ids)

    def _contains(self, text: str) -> bool:
        return any(stop in text for stop in self._texts)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
