"""Datasets of conversations as JSON lines, and the endless stream of prompts that a run draws from."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowrl.data.batch.fields import FIELDS
from flowrl.data.chat import ChatTokenizer, DataError, Message, Speaker

SPEAKERS: dict[str, Speaker] = {"human": "user", "user": "user", "assistant": "assistant", "system": "system"}
"""What may stand under `from` or `role`, and the role it means."""

RESERVED = frozenset({*FIELDS, "length"} - {"answer", "data_source"})
"""Columns that a run writes itself, so that a dataset cannot bring them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of a dataset: the turns, every other key of the line, and where the line stands."""

    messages: tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    file: Path = Path("-")
    line: int = 0

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.line}"


def read_conversations(
    path: Path | str, *, last: Literal["user", "assistant"] | None = None, needs: Sequence[str] = ()
) -> list[Conversation]:
    """Reads a file with one JSON object per line: `{"messages": [{"from": "human", "content": ...}], "answer": ...}`.

    Args:
        path: the file. `from` is human, assistant or system (`role` and `user` are understood too); keys beside
            `messages` become columns.
        last: who must speak last: the user in prompts, the assistant in examples.
        needs: columns that every line must have, such as `answer`.
    Raises:
        DataError: the file is missing or empty, or a line is not such a conversation; names the file and the line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"cannot be read ({error.strerror})"
        raise DataError(f"dataset {file} {reason}") from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise DataError(f"dataset {file} is empty; write one conversation per line")
    conversations = [_conversation(text, file, number) for number, text in enumerate(lines, start=1)]
    for conversation in conversations:
        _check_last(conversation, last)
        for name in needs:
            if conversation.columns.get(name) is None:
                raise DataError(f"{conversation.place}: {name!r} is missing; add it beside 'messages'")
    return conversations


def _conversation(text: str, file: Path, line: int) -> Conversation:
    place = f"{file}, line {line}"
    if not text.strip():
        raise DataError(f"{place}: the line is empty; write one JSON object per line")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list) or not value["messages"]:
        raise DataError(f'{place}: expected an object with "messages": [{{"from": "human", "content": "..."}}]')
    columns = {name: column for name, column in value.items() if name != "messages"}
    for name in RESERVED:
        if name in columns:
            raise DataError(f"{place}: {name!r} is a column that the run writes; give it another name")
    return Conversation(tuple(_message(turn, place) for turn in value["messages"]), columns, file, line)


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
        raise DataError(f'{place}: a message is {{"from": ..., "content": "text"}}, not {json.dumps(turn)[:80]}')
    speaker = turn.get("from", turn.get("role"))
    if speaker not in SPEAKERS:
        raise DataError(f"{place}: a message is from {json.dumps(speaker)}; allowed are {', '.join(SPEAKERS)}")
    return Message(SPEAKERS[speaker], turn["content"])


def _check_last(conversation: Conversation, last: Literal["user", "assistant"] | None) -> None:
    if last is None or conversation.messages[-1].role == last:
        return
    found = conversation.messages[-1].role
    fix = "remove it from a file of prompts" if last == "user" else "an example ends with what to learn"
    raise DataError(f"{conversation.place}: the last message is from the {found}, not from the {last}; {fix}")


class PromptStream:
    """PromptQueue prompts without end, epoch after epoch."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        tokenizer: ChatTokenizer,
        *,
        seed: int,
        max_prompt_tokens: int,
        shuffle: bool = True,
    ) -> None:
        """Tokenises every prompt, so that one that is too long is known before anything starts.

        Args:
            conversations: the dataset; each ends with the user.
            tokenizer: of the model that answers.
            seed: decides the order of every epoch.
            max_prompt_tokens: the longest prompt allowed.
            shuffle: read every epoch in another order; false keeps that of the dataset.
        Raises:
            DataError: there is no conversation, one ends with the assistant, or one has more than `max_prompt_tokens`.
        """
        if not conversations:
            raise DataError("a stream of prompts needs at least one conversation")
        prompts: list[np.ndarray] = []
        for conversation in conversations:
            _check_last(conversation, "user")
            ids = tokenizer.encode_prompt(conversation.messages)
            if len(ids) > max_prompt_tokens:
                raise DataError(
                    f"{conversation.place}: the prompt has {len(ids)} tokens, and at most {max_prompt_tokens} are "
                    f"allowed; shorten it or raise max_prompt_tokens"
                )
            prompts.append(np.asarray(ids, dtype=np.int32))
        self._conversations = conversations
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = 0
        # All rows have the same columns; None stands where a line has no such key.
        names = dict.fromkeys(name for conversation in conversations for name in conversation.columns)
        self._names = ("answer", *(name for name in names if name != "answer"))
        self._prompts = prompts
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._conversations)

    def take(self, num_prompts: int) -> list[dict[str, Any]]:
        """The next prompts, as rows.

        Returns:
            Rows of `prompt` (what the user said last), `prompt_ids`, `answer`, the dataset's other columns, `prompt_id`
            (the number of the draw, which no other draw of the run has) and `group` (the same number).
        """
        first = self._drawn
        self._drawn += num_prompts
        return self.rows(range(first, self._drawn))

    def rows(self, draws: Iterable[int]) -> list[dict[str, Any]]:
        """The rows of draws by their numbers, as `take` gave or will give them. PromptQueue nothing."""
        return [self._row(self._index(draw), draw) for draw in draws]

    def place(self, draw: int) -> str:
        """The file and the line of a draw's prompt."""
        return self._conversations[self._index(draw)].place

    def evaluation_rows(self, num_rows: int | None = None) -> list[dict[str, Any]]:
        """Every prompt once, in the order of the file, numbered from 0; only the first `num_rows` if stated."""
        count = len(self) if num_rows is None else min(num_rows, len(self))
        return [self._row(place, place) for place in range(count)]

    def state(self) -> dict[str, int]:
        """Where the stream stands: all that `restore` needs, given the same dataset."""
        return {"drawn": self._drawn, "seed": self._seed, "num_prompts": len(self)}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on where `state` was taken.

        Raises:
            DataError: the state is of a stream with another seed or another number of prompts.
        """
        for name, here in (("seed", self._seed), ("num_prompts", len(self))):
            if state[name] != here:
                raise DataError(
                    f"the saved stream of prompts has {name} {state[name]}, this run has {here}; resume with the same"
                )
        self._drawn = state["drawn"]

    def _index(self, draw: int) -> int:
        """Which conversation a draw gives."""
        epoch, position = divmod(draw, len(self))
        if not self._shuffle:
            return position
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self))
        return int(self._order[position])

    def _row(self, place: int, number: int) -> dict[str, Any]:
        conversation = self._conversations[place]
        return {
            "prompt": conversation.messages[-1].content,
            "prompt_ids": self._prompts[place].tolist(),
            **{name: conversation.columns.get(name) for name in self._names},
            "prompt_id": number,
            "group": number,
        }
