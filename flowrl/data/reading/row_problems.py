"""Reasons for dropping rows, and the number of dropped rows per reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.data.messages import DataError

REASONS: Mapping[str, str] = {
    "unreadable_file": "the file is truncated or corrupt; rows before the corrupt part are used",
    "row_too_large": "the row exceeds `max_row_mb`",
    "invalid_utf8": "the row is not UTF-8 text, or contains an unpaired surrogate",
    "invalid_json": "the row is not valid JSON, has NaN or a repeated key, or the line is empty",
    "unknown_shape": "the keys of the row match no known shape",
    "unknown_key": "a turn or the prompt has a key that flowrl does not read, such as `tool_calls` or `tools`",
    "content_not_text": "a message is null, a number, a date, bytes or a list instead of text",
    "unknown_role": "the role of a message is unknown",
    "empty_turn": "a message is empty",
    "wrong_order": "user and assistant do not alternate, or the conversation begins with the assistant",
    "no_prompt": "there is no message from the user",
    "no_answer": "there is no response to train on",
    "trailing_assistant": "the last message of a prompt is from the assistant",
    "equal_pair": "chosen and rejected are equal",
    "different_prompts": "chosen and rejected differ before a response of the assistant",
    "wrong_margin": "the margin of a pair is not a number of at least 0",
    "reserved_column": "a column has a name that is reserved for flowrl",
    "missing_column": "a column that the reward function requires is missing or null",
    "template": "the chat template rejects the conversation, or the responses cannot be located in the rendered text",
    "no_embedding": "the text has a token whose id is beyond the embeddings of the model",
    "too_long": "the row has more than `max_tokens` tokens",
    "too_short": "the row has fewer than `min_tokens` tokens",
    "short_response": "the response has fewer than `min_response_tokens` tokens",
    "long_response": "the response has more than `max_response_tokens` tokens",
    "duplicate": "an earlier row has the same messages",
    "near_duplicate": "an earlier row has almost the same text",
}
"""Reason -> its meaning."""


class RowProblem(Exception):
    """Raised for a row that cannot be used."""

    def __init__(self, reason: str, message: str) -> None:
        assert reason in REASONS, reason
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reason, str(self))


@dataclass
class RowCounts:
    """Numbers of rows that were read and dropped. In strict mode, the first dropped row raises DataError."""

    strict: bool = False
    allowed: frozenset[str] = frozenset()
    """Reasons that do not raise an error in strict mode, because filters drop these rows on purpose."""
    num_read: int = 0
    num_truncated: int = 0
    """Number of truncated rows, which are kept."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of dropped rows."""
    first: dict[str, str] = field(default_factory=dict)
    """Reason -> location and message of the first dropped row."""

    def drop(self, problem: RowProblem, file: Path, line: int) -> None:
        """Counts a dropped row. Raises DataError in strict mode."""
        message = f"{file}, line {line}: {problem}"
        if self.strict and problem.reason not in self.allowed:
            raise DataError(message)
        self.dropped[problem.reason] = self.dropped.get(problem.reason, 0) + 1
        self.first.setdefault(problem.reason, message)

    def add(self, other: "RowCounts") -> None:
        """Adds the counts of later rows."""
        self.num_read += other.num_read
        self.num_truncated += other.num_truncated
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
            self.first.setdefault(reason, other.first[reason])

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    def summary(self) -> str:
        """Returns a line such as `3 of 10 rows dropped: empty_turn 2 (first: a.jsonl, line 4: ...), ...`."""
        reasons = ", ".join(
            f"{reason} {count} (first: {self.first[reason]})"
            for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1])
        )
        return f"{self.num_dropped} of {self.num_read} rows dropped: {reasons}"
