"""Messages and conversations: the rows of a dataset after reading."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowrl.config.user_errors import UserError

Speaker = Literal["system", "user", "assistant", "tool"]

ROLE_NAMES: dict[str, Speaker] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""Maps the role of a turn in a dataset to the chat role."""


class DataError(UserError):
    """Raised if a dataset or a tokenizer cannot be used for the run."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Speaker
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a dataset: its messages, and all other keys as columns."""

    messages: tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    file: Path = Path("-")
    line: int = 0
    chosen: tuple[Message, ...] = ()
    """Messages that follow `messages`: a completion, or the preferred continuation of a pair."""
    rejected: tuple[Message, ...] = ()
    """The rejected continuation of `messages`."""
    label: bool | None = None
    """Whether `chosen` is desirable, for KTO."""
    text: tuple[str, str] | None = None
    """Plain text without turns: (text before the trained text, trained text)."""

    @property
    def location(self) -> str:
        return f"{self.file}, line {self.line}"
