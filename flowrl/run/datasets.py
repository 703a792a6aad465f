"""From a recipe's config to the data it reads, checked before anything starts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flowrl.config import DataConfig, OnPolicyConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.chat import ChatTokenizer, DataError
from flowrl.data.prompts import PromptStream, read_conversations


def read_prompts(config: OnPolicyConfig) -> tuple[PromptStream, PromptStream | None]:
    """Training prompts, and held-out ones where the config names a file.

    Raises:
        DataError: naming file and line, for a row that is no prompt or longer than `data.max_prompt_tokens`; or naming
            the keys, when the model's folder has no tokenizer that serves, when prompt and response together are longer
            than the model takes, or when a stop has a token that the tokenizer has not.
    """
    try:
        tokenizer = ChatTokenizer(config.actor.model.path)
    except DataError as error:
        raise DataError(f"actor.model.path: {error}") from error
    _check_stops(tokenizer, config)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    check_context(tokenizer, longest, "data.max_prompt_tokens + rollout.max_response_tokens")
    train = read_stream(config.data.train, config.data, tokenizer, seed=config.seed)
    held_out = (
        None if config.data.test is None else read_stream(config.data.test, config.data, tokenizer, seed=config.seed)
    )
    return train, held_out


def _check_stops(tokenizer: ChatTokenizer, config: OnPolicyConfig) -> None:
    for number, stop in enumerate(config.rollout.stop_ids):
        for token in stop:
            if token >= len(tokenizer):
                raise DataError(
                    f"rollout.stop_ids.{number} has the token {token}, which no response can say: the tokenizer in "
                    f"{tokenizer.path} has 0 to {len(tokenizer) - 1}"
                )


def read_stream(path: Path, data: DataConfig, tokenizer: ChatTokenizer, *, seed: int) -> PromptStream:
    """The prompts of one file."""
    conversations = read_conversations(path, last="user")
    return PromptStream(
        conversations, tokenizer, seed=seed, max_prompt_tokens=data.max_prompt_tokens, shuffle=data.shuffle
    )


def check_context(tokenizer: ChatTokenizer, num_tokens: int, what: str) -> None:
    """Refuses sequences longer than the model's positions, where its config states them."""
    limit = tokenizer.max_positions()
    if limit is not None and num_tokens > limit:
        raise DataError(
            f"{what} is {num_tokens}, but the model in {tokenizer.path} takes {limit} tokens at most; lower one of them"
        )


class Examples:
    """Conversations with answers, tokenised for supervised fine-tuning.

    Raises:
        DataError: naming file and line, for a conversation that does not end with the assistant, or is longer than the
            model takes.
    """

    def __init__(self, path: Path, model: Path, *, max_tokens: int) -> None:
        tokenizer = ChatTokenizer(model)
        check_context(tokenizer, max_tokens, "data.max_prompt_tokens")
        self._ids: list[list[int]] = []
        self._masks: list[list[bool]] = []
        for conversation in read_conversations(path, last="assistant"):
            ids, mask = tokenizer.encode_example(conversation.messages)
            if len(ids) > max_tokens:
                raise DataError(
                    f"{conversation.location}: the conversation has {len(ids)} tokens, and at most {max_tokens} are "
                    f"allowed; shorten it or raise data.max_prompt_tokens"
                )
            self._ids.append(ids)
            self._masks.append(mask)

    def __len__(self) -> int:
        return len(self._ids)

    def batches(self, rows: int, *, seed: int, shuffle: bool, epochs: int | None = None) -> Iterator[Batch]:
        """Batches of `rows` examples, each once per epoch in an order of the seed; the last batch may be short."""
        epoch = 0
        while epochs is None or epoch < epochs:
            order = np.random.default_rng([seed, epoch]).permutation(len(self)) if shuffle else np.arange(len(self))
            for start in range(0, len(self), rows):
                yield self._batch(order[start : start + rows])
            epoch += 1

    def _batch(self, places: np.ndarray) -> Batch:
        ids = [self._ids[place] for place in places]
        tokens = {
            "input_ids": np.concatenate([np.asarray(row, dtype=np.int64) for row in ids]),
            "response_mask": np.concatenate([np.asarray(self._masks[place], dtype=bool) for place in places]),
        }
        return Batch.from_columns(tokens=tokens, lengths=[len(row) for row in ids])
