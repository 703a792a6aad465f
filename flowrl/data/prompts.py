"""Streams prompts in random order, or by their measured success. A stream can be resumed at any position."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from flowrl.config import DifficultyConfig
from flowrl.data.batch.fields import FIELDS
from flowrl.data.chat import ChatTokenizer, MissingEmbeddingError
from flowrl.data.messages import Conversation, DataError
from flowrl.data.order.epoch_order import EpochOrder
from flowrl.data.order.success_order import SuccessOrder
from flowrl.data.reading import reader
from flowrl.data.reading.kinds import select_turns
from flowrl.data.reading.row_problems import RowCounts, RowProblem
from flowrl.data.template import TemplateTimeError, naming_row

_logger = logging.getLogger(__name__)

_ENCODED_TOGETHER = 1024
"""Number of prompts that are tokenized in one call, because one call per prompt takes several times as long."""

RESERVED_COLUMNS = frozenset({*FIELDS, "length"} - {"answer", "data_source"})
"""Names of columns that flowrl writes. A dataset must not contain these names."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt with its tokens."""

    conversation: Conversation
    ids: np.ndarray
    """int32 [T], with the generation prompt of the chat template."""


@dataclass(frozen=True)
class PromptSet:
    """Tokenized prompts of several files, in the order of the files."""

    rows: Sequence[TokenizedPrompt]
    columns: tuple[str, ...]
    """Names of the columns of all rows."""
    parts: tuple[tuple[int, float], ...] = ()
    """(number of rows, weight) of each file. If empty, there is one file with weight 1."""

    @property
    def weighted_parts(self) -> tuple[tuple[int, float], ...]:
        return self.parts or ((len(self.rows), 1.0),)


def read_conversations(files: reader.Files, **policies: Any) -> list[Conversation]:  # Any: see `reader`
    """Reads all rows of files. Rejects columns with names that flowrl writes.

    `reader.read_conversations` describes the arguments and errors.
    """
    return reader.read_conversations(files, reserved=RESERVED_COLUMNS, **policies)


def tokenize_prompts(
    conversations: Sequence[Conversation],
    tokenizer: ChatTokenizer,
    *,
    max_prompt_tokens: int,
    too_long: Literal["refuse", "drop", "truncate"] = "refuse",
    parts: tuple[tuple[int, float], ...] = (),
    strict: bool = True,
) -> PromptSet:
    """Tokenizes all prompts. Logs the number of dropped prompts per reason.

    Args:
        conversations: the dataset. Each conversation ends with a user message.
        tokenizer: tokenizer of the policy.
        max_prompt_tokens: maximum number of tokens of a prompt.
        too_long: treatment of a longer prompt: raise an error, drop the prompt, or drop its first turns.
        parts: number of conversations and weight of each file.
        strict: whether to raise an error if the chat template rejects a prompt. False drops the prompt.
    Raises:
        DataError: the dataset is empty, a conversation ends with the assistant, or a prompt is too long.
    """
    if not conversations:
        raise DataError("the dataset has no prompts: give at least one conversation")
    allowed = frozenset() if too_long == "refuse" else frozenset({"too_long"})
    dropped = RowCounts(strict=strict, allowed=allowed, num_read=len(conversations))
    rows: list[TokenizedPrompt] = []
    counts: list[tuple[int, float]] = []
    start = 0
    for count, weight in parts or ((len(conversations), 1.0),):
        before = len(rows)
        for conversation, encoded in _encode_in_batches(conversations[start : start + count], tokenizer):
            try:
                if isinstance(encoded, Exception):
                    raise encoded
                rows.append(
                    _limit_length(
                        conversation, encoded, tokenizer, max_prompt_tokens, too_long, "data.max_prompt_tokens"
                    )
                )
            except RowProblem as problem:
                if problem.reason == "too_long" and too_long == "refuse":
                    raise too_long_error(conversation, problem) from problem
                dropped.drop(problem, conversation.file, conversation.line)
        counts.append((len(rows) - before, weight))
        start += count
    if not rows:
        raise DataError(f"no prompt can be used: {dropped.summary()}")
    if dropped.num_dropped:
        _logger.warning("%s", dropped.summary())
    names = dict.fromkeys(name for row in rows for name in row.conversation.columns)
    return PromptSet(rows, tuple(names), tuple(counts))


def tokenize_prompt(
    conversation: Conversation,
    tokenizer: ChatTokenizer,
    max_tokens: int | None,
    too_long: Literal["refuse", "drop", "truncate"],
    setting: str,
) -> TokenizedPrompt:
    """Returns the tokens of a prompt. With `truncate`, drops the first turns of a long prompt, but not its system
    message. `setting` is the key of `max_tokens` in error messages.

    Raises RowProblem if the prompt is too long or does not end with the user, or if the chat template rejects it.
    """
    return _limit_length(conversation, _encode(conversation, tokenizer), tokenizer, max_tokens, too_long, setting)


def _encode_in_batches(
    conversations: Iterable[Conversation], tokenizer: ChatTokenizer
) -> Iterator[tuple[Conversation, list[int] | RowProblem | TemplateTimeError]]:
    """Yields each conversation with the token ids of its prompt, or with the error that it caused.

    An error ends its batch, so that later conversations are not rendered if the caller raises the error.
    """
    batch: list[Conversation] = []
    texts: list[str] = []
    for conversation in conversations:
        failure = None
        try:
            texts.append(_render(conversation, tokenizer))
            batch.append(conversation)
        except (RowProblem, TemplateTimeError) as error:
            failure = error
        if failure is not None or len(texts) == _ENCODED_TOGETHER:
            yield from zip(batch, tokenizer.encode_all(texts), strict=True)
            batch, texts = [], []
        if failure is not None:
            yield conversation, failure
    yield from zip(batch, tokenizer.encode_all(texts), strict=True)


def _encode(prompt: Conversation, tokenizer: ChatTokenizer) -> list[int]:
    (ids,) = tokenizer.encode_all([_render(prompt, tokenizer)])
    return ids


def _render(prompt: Conversation, tokenizer: ChatTokenizer) -> str:
    """Returns the text of a prompt. Raises RowProblem or TemplateTimeError."""
    if prompt.messages[-1:] and prompt.messages[-1].role == "assistant":
        select_turns(prompt, "prompts")
    try:
        with naming_row(prompt.location):
            return tokenizer.render_prompt(prompt.messages)
    except DataError as error:
        raise RowProblem("template", str(error)) from error


def _limit_length(
    conversation: Conversation,
    ids: list[int],
    tokenizer: ChatTokenizer,
    max_tokens: int | None,
    too_long: Literal["refuse", "drop", "truncate"],
    setting: str,
) -> TokenizedPrompt:
    """Returns a prompt with its token ids `ids`, without the first turns that exceed `max_tokens`."""
    _check_embeddings(ids, tokenizer)
    length = len(ids)
    while max_tokens is not None and len(ids) > max_tokens:
        users = [i for i, message in enumerate(conversation.messages) if message.role == "user"]
        if too_long != "truncate" or len(users) < 2:
            raise RowProblem(
                "too_long",
                f"the prompt has {length} tokens, more than {setting} ({max_tokens}): shorten it, or raise {setting}",
            )
        system = conversation.messages[: users[0]]
        conversation = replace(conversation, messages=(*system, *conversation.messages[users[1] :]))
        ids = _encode(conversation, tokenizer)
        _check_embeddings(ids, tokenizer)
    return TokenizedPrompt(conversation, np.asarray(ids, dtype=np.int32))


def _check_embeddings(ids: Sequence[int], tokenizer: ChatTokenizer) -> None:
    try:
        tokenizer.check_ids(ids)
    except MissingEmbeddingError as error:
        raise RowProblem("no_embedding", str(error)) from error


def too_long_error(row: Conversation, problem: RowProblem) -> DataError:
    """Returns the error for a row that `data.too_long: refuse` rejects."""
    return DataError(f"{row.location}: {problem}, or set data.too_long: drop")


def _initial_success(prompts: PromptSet, column: str) -> np.ndarray:
    """Returns the initial success of each prompt, or NaN if it is null. Raises DataError for other values."""
    values = np.full(len(prompts.rows), np.nan)
    for index, prompt in enumerate(prompts.rows):
        value = prompt.conversation.columns.get(column)
        is_rate = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
        if value is None:
            continue
        if not is_rate:
            raise DataError(
                f"{prompt.conversation.location}: column {column} of data.difficulty is {value!r}, but must be a "
                "success rate from 0 to 1, or null: convert the column"
            )
        values[index] = value
    if np.isnan(values).all():
        raise DataError(
            f"no prompt has a value in the column {column} of data.difficulty.column: name one of "
            f"{', '.join(prompts.columns) or 'the columns (there are none)'}"
        )
    return values


_NO_FILTER = DifficultyConfig()


class PromptStream:
    """An endless stream of tokenized prompts. By default, every epoch has a new random order.

    The index of a prompt in the stream, from 0, is the `prompt_id` of its rows.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        tokenizer: ChatTokenizer,
        *,
        seed: int,
        max_prompt_tokens: int,
        order: Literal["file", "shuffle", "curriculum"] = "shuffle",
        difficulty: DifficultyConfig = _NO_FILTER,
        samples: int = 1,
    ) -> None:
        """Tokenizes all prompts. `from_prompts` accepts prompts that are already tokenized.

        Args:
            conversations: the dataset. Each conversation ends with a user message.
            tokenizer: tokenizer of the policy.
            seed: seed of the random order of every epoch.
            max_prompt_tokens: maximum number of tokens of a prompt.
            order: see `data.order`.
            difficulty: see `data.difficulty`.
            samples: number of responses per prompt, used as the weight of a measured success.
        Raises:
            DataError: the dataset is empty, a conversation ends with the assistant, or a prompt is too long.
        """
        prompts = tokenize_prompts(conversations, tokenizer, max_prompt_tokens=max_prompt_tokens)
        self._set_prompts(prompts, seed, order, difficulty, samples)

    @classmethod
    def from_prompts(
        cls,
        prompts: PromptSet,
        *,
        seed: int,
        order: Literal["file", "shuffle", "curriculum"] = "shuffle",
        difficulty: DifficultyConfig = _NO_FILTER,
        samples: int = 1,
    ) -> "PromptStream":
        """Returns the stream of tokenized prompts, which may be in a prepared folder. See `__init__`."""
        stream = cls.__new__(cls)
        stream._set_prompts(prompts, seed, order, difficulty, samples)
        return stream

    def _set_prompts(
        self, prompts: PromptSet, seed: int, order: str, difficulty: DifficultyConfig, samples: int
    ) -> None:
        self._prompts, self._seed = prompts, seed
        self._order = EpochOrder(prompts.weighted_parts, seed=seed, shuffle=order != "file")
        self._num_drawn = 0
        self._requeued: deque[int] = deque()
        """Drawn prompts that `take` returns again, before new prompts."""
        # All rows have the same columns. The value of a missing column is None.
        self._names = ("answer", *(name for name in prompts.columns if name != "answer"))
        self._by_success: SuccessOrder | None = None
        if order == "curriculum" or difficulty.is_filter:
            self._by_success = SuccessOrder(
                self._order,
                len(prompts.rows),
                seed=seed,
                difficulty=difficulty,
                num_candidates=difficulty.candidates if order == "curriculum" else 1,
                samples=samples,
                initial=None if difficulty.column is None else _initial_success(prompts, difficulty.column),
            )

    def __len__(self) -> int:
        """Returns the number of prompts per epoch. Without weights of files, this is the size of the dataset."""
        return len(self._order)

    @property
    def conversations(self) -> Iterator[Conversation]:
        """Conversations of the dataset, in the order of its rows."""
        return (prompt.conversation for prompt in self._prompts.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the dataset. `answer` is always one of them."""
        return self._names

    def take(self, num_prompts: int) -> list[dict[str, Any]]:
        """Returns the rows of the next `num_prompts` prompts and advances the stream. Requeued prompts come first.

        A row has the columns `prompt`, `conversation`, `prompt_ids`, `answer`, `prompt_id` and `group` (docs/batch.md),
        and the other columns of the dataset.
        """
        prompt_ids = [self._requeued.popleft() for _ in range(min(num_prompts, len(self._requeued)))]
        first, num_new = self._num_drawn, num_prompts - len(prompt_ids)
        if self._by_success is not None:
            for _ in range(num_new):
                self._by_success.draw()
        self._num_drawn += num_new
        prompt_ids += range(first, self._num_drawn)
        return [self._row(self._index(prompt_id), prompt_id) for prompt_id in prompt_ids]

    def requeue(self, prompt_ids: Sequence[int]) -> None:
        """Returns drawn prompts to the head of the stream."""
        self._requeued.extendleft(reversed(prompt_ids))

    def location(self, prompt_id: int) -> str:
        return self._prompts.rows[self._index(prompt_id)].conversation.location

    def _index(self, prompt_id: int) -> int:
        position = prompt_id if self._by_success is None else self._by_success.position(prompt_id)
        return self._order.row(position)

    @property
    def needs_success(self) -> bool:
        """Whether the next prompts depend on `record_success`."""
        return self._by_success is not None

    def record_success(self, prompt_ids: Sequence[int], success: Sequence[float]) -> None:
        """Adds the measured success of drawn prompts: the mean score of each prompt's responses.

        NaN is ignored. Call the method at the same position of every step, because later prompts depend on the success.
        Has no effect unless `needs_success`.
        """
        if self._by_success is not None:
            self._by_success.record(prompt_ids, success)

    def evaluation_rows(self, num_rows: int | None = None) -> list[dict[str, Any]]:
        """Returns the first `num_rows` prompts in the order of the file (None: all prompts). Prompt ids start at 0."""
        total = len(self._prompts.rows)
        count = total if num_rows is None else min(num_rows, total)
        return [self._row(index, index) for index in range(count)]

    def state(self, untrained: Iterable[int] = ()) -> dict[str, Any]:
        """Returns the position in the stream and the measured success as JSON values, for `restore`.

        The state does not contain the dataset. A restored stream begins with the drawn prompts `untrained`.
        """
        state: dict[str, Any] = {"drawn": self._num_drawn, "seed": self._seed, "num_prompts": len(self)}
        state["untrained"] = [*untrained, *self._requeued]
        return state if self._by_success is None else state | {"success": self._by_success.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved position.

        Raises `DataError` if the seed, the number of prompts, or the use of measured success has changed.
        """
        for name, current in (("seed", self._seed), ("num_prompts", len(self))):
            if state[name] != current:
                raise DataError(
                    f"the saved prompt stream has {name} {state[name]}, but this run has {current}; restore the value"
                )
        if ("success" in state) != self.needs_success:
            names = ("has no", "has") if self.needs_success else ("has", "has no")
            raise DataError(
                f"the saved prompt stream {names[0]} measured success, but the order of this run {names[1]} use for "
                "it: restore data.order and data.difficulty"
            )
        if self._by_success is not None:
            self._by_success.restore(state["success"])
        self._num_drawn = state["drawn"]
        self._requeued = deque(state["untrained"])

    def _row(self, index: int, prompt_id: int) -> dict[str, Any]:
        prompt = self._prompts.rows[index]
        conversation = prompt.conversation
        return {
            "prompt": conversation.messages[-1].content,
            "conversation": [asdict(message) for message in conversation.messages],
            "prompt_ids": prompt.ids.tolist(),
            **{name: conversation.columns.get(name) for name in self._names},
            "prompt_id": prompt_id,
            "group": prompt_id,
        }
