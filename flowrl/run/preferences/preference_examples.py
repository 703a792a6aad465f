"""Reads pairs and labeled responses, and forms the batches of a run from them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flowrl.config import DataConfig, PreferenceActorConfig, RewardModelConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.messages import DataError
from flowrl.data.preparation.tokenized_rows import Tokens
from flowrl.data.reading import reader
from flowrl.data.reading.kinds import Kind
from flowrl.run.datasets.row_batches import RowBatches
from flowrl.run.datasets.tokenized_data import TokenizedData, check_context, read_rows, read_tokenizer
from flowrl.workers.losses.preference_losses import REFERENCE

MISMATCHED = "mismatched"
"""Name of the row column that is true for rows whose response belongs to another prompt."""


PREFERENCE_ROLES = (PreferenceActorConfig, RewardModelConfig)
"""Config classes of the roles that are trained on preferences."""


class _Tokens(NamedTuple):
    """Token ids of a conversation: the ids before the last response, and the ids of this response, including its end
    token.
    """

    prompt: np.ndarray
    response: np.ndarray


class PreferenceExamples:
    """Tokenized pairs, or single labeled responses, in the order of their files.

    Only the last assistant turn is trained. Tokens after the end token of this turn are dropped, so that a reward model
    scores the end token, as in a response of a rollout.
    """

    def __init__(self, rows: TokenizedData, *, is_paired: bool, max_tokens: int) -> None:
        """Stores rows of kind `preference`, or of kind `kto` if `is_paired` is false.

        Raises DataError if all labeled responses have the same prompt, or if only some pairs have a margin.
        """
        self._rows, self._max_tokens = rows, max_tokens
        self.is_paired = is_paired
        if not is_paired:
            self._check_has_two_prompts()
        self._has_margin = is_paired and rows.has_column("margin")
        self.reference_logprobs: np.ndarray | None = None
        """Log-probability of each response under the reference. `store_reference` sets it."""

    @staticmethod
    def read(
        data: DataConfig, role: PreferenceActorConfig | RewardModelConfig
    ) -> "tuple[PreferenceExamples, dict[str, Batch]]":
        """Returns the training rows, and the held-out rows of each evaluation set by its name.

        KTO reads labeled responses, and all other losses read pairs. Raises DataError if a row is invalid.
        """
        tokenizer, max_tokens = read_tokenizer(role.model, data), data.max_prompt_tokens
        check_context(tokenizer, max_tokens, "data.max_prompt_tokens")
        is_paired = isinstance(role, RewardModelConfig) or role.loss.is_paired
        kind: Kind = "preference" if is_paired else "kto"

        def read(files: reader.Files, num_rows: int | None = None) -> PreferenceExamples:
            rows = read_rows(files, tokenizer, kind, data, row_limit=num_rows)
            return PreferenceExamples(rows, is_paired=is_paired, max_tokens=max_tokens)

        held_out = {
            name: read(files, data.num_evaluation_rows(name)).batch() for name, files in data.evaluation_files.items()
        }
        return read(data.training_files), held_out

    def __len__(self) -> int:
        """Returns the number of pairs or labeled responses per epoch, which is `num_rows` unless files have weights."""
        return len(self._rows.order(seed=0))

    @property
    def num_rows(self) -> int:
        """Number of pairs or labeled responses of the dataset."""
        return len(self._rows)

    def batches(self, num_rows: int, *, seed: int, shuffle: bool, epochs: int | None = None) -> RowBatches:
        """Returns batches of `num_rows` pairs or responses, in an order that depends only on the seed and the epoch."""
        order = self._rows.order(seed=seed, shuffle=shuffle)
        return RowBatches(order, num_rows, self.batch, epochs=epochs)

    def batch(self, indices: np.ndarray | None = None) -> Batch:
        """Returns the pairs or labeled responses at `indices`, or all.

        A pair has two adjacent rows with the same value of `pair`, the chosen response first. Labeled responses have
        the column `desirable`. After them, the batch has one mismatched row per labeled response. Such a row combines
        the prompt with the response of the next row whose prompt differs. KTO estimates the KL from the rows in which
        `mismatched` is true.
        """
        indices = np.arange(len(self._rows)) if indices is None else indices
        if not self.is_paired:
            return self._labeled_batch(indices)
        pairs = [self._rows[int(index)] for index in indices]
        columns: dict[str, np.ndarray] = {"pair": np.repeat(np.arange(len(indices)), 2)}
        if self._has_margin:
            margins = [pair.conversation.columns["margin"] for pair in pairs]
            columns["margin"] = np.repeat(np.asarray(margins, dtype=np.float32), 2)
        if self.reference_logprobs is not None:
            columns[REFERENCE] = self.reference_logprobs[np.stack([2 * indices, 2 * indices + 1], axis=1).reshape(-1)]
        return _make_batch([_split(side) for pair in pairs for side in pair.sides], columns)

    def _labeled_batch(self, indices: np.ndarray) -> Batch:
        own = [self._rows[int(index)] for index in indices]
        rows = [_split(row.sides[0]) for row in own]
        prompts = [row.prompt.tobytes() for row in rows]
        others = [self._other_response(i, int(index), rows, prompts) for i, index in enumerate(indices)]
        rows += [
            _Tokens(row.prompt, response[: max(1, self._max_tokens - len(row.prompt))])
            for row, response in zip(rows, others, strict=True)
        ]
        labels = [row.conversation.label for row in own]
        columns = {
            "desirable": np.asarray(labels * 2, dtype=bool),
            MISMATCHED: np.repeat([False, True], len(indices)),
        }
        return _make_batch(rows, columns)

    def _other_response(self, i: int, index: int, rows: "Sequence[_Tokens]", prompts: Sequence[bytes]) -> np.ndarray:
        """Returns the response of the next row of the batch whose prompt differs from that of row `i`. If all prompts
        of the batch are equal, searches the dataset after `index` for such a row.
        """
        for distance in range(1, len(rows)):
            other = (i + distance) % len(rows)
            if prompts[other] != prompts[i]:
                return rows[other].response
        following = (self._labeled((index + distance) % len(self._rows)) for distance in range(1, len(self._rows)))
        return next(row.response for row in following if row.prompt.tobytes() != prompts[i])

    def _check_has_two_prompts(self) -> None:
        """Raises DataError if all rows have the same prompt."""
        prompt = self._labeled(0).prompt
        if all(np.array_equal(self._labeled(index).prompt, prompt) for index in range(1, len(self._rows))):
            raise DataError(
                f"{self._rows[0].conversation.location}: KTO needs the response to another prompt, but all rows have "
                "the same prompt: add rows with other prompts"
            )

    def _labeled(self, index: int) -> "_Tokens":
        return _split(self._rows[index].sides[0])


def _split(side: Tokens) -> _Tokens:
    """Splits a row into the tokens before the trained turn and the tokens of this turn. Drops the tokens after this
    turn.
    """
    trained = np.flatnonzero(side.mask)
    start, end = int(trained[0]), int(trained[-1]) + 1
    return _Tokens(side.ids[:start], side.ids[start:end])


def _make_batch(rows: Sequence[_Tokens], columns: dict[str, np.ndarray]) -> Batch:
    tokens = {
        "input_ids": np.concatenate([part for row in rows for part in row]).astype(np.int64),
        "response_mask": np.repeat([False, True] * len(rows), [len(part) for row in rows for part in row]),
    }
    return Batch.from_columns(columns, tokens, [len(row.prompt) + len(row.response) for row in rows])
