"""Reads and validates the data of a run before the run starts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flowrl.config import DataConfig, OnPolicyConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.chat import ChatTokenizer, DataError, read_vocabulary
from flowrl.data.prompts import PromptStream, read_conversations


def read_prompts(config: OnPolicyConfig) -> tuple[PromptStream, PromptStream | None]:
    """Returns the training prompts, and the held-out prompts or None.

    Raises DataError if a row or a setting is invalid.
    """
    try:
        tokenizer = ChatTokenizer(config.actor.model.path)
    except DataError as error:
        raise DataError(f"actor.model.path: {error}") from error
    for i, stop in enumerate(config.rollout.stop_ids):
        for token in stop:
            if token >= len(tokenizer):
                raise DataError(
                    f"rollout.stop_ids.{i} has the token {token}, which is not in the vocabulary of "
                    f"{tokenizer.path}: use ids from 0 to {len(tokenizer) - 1}"
                )
    _check_reward_tokenizer(tokenizer, config)
    max_tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    check_context(tokenizer, max_tokens, "data.max_prompt_tokens + rollout.max_response_tokens")
    test = config.data.test
    train = read_stream(config.data.train, config.data, tokenizer, seed=config.seed)
    return train, None if test is None else read_stream(test, config.data, tokenizer, seed=config.seed)


def _check_reward_tokenizer(tokenizer: ChatTokenizer, config: OnPolicyConfig) -> None:
    """Raises DataError if a reward model's vocabulary differs from the actor's. Both receive the same token ids."""
    model = config.reward.model
    if model is None or model.path == config.actor.model.path:
        return
    try:
        vocabulary = read_vocabulary(model.path)
    except DataError as error:
        raise DataError(f"reward.model.path: {error}") from error
    if vocabulary != tokenizer.tokenizer.get_vocab():
        raise DataError(
            f"reward.model.path: the vocabulary of the tokenizer in {model.path} differs from that of the actor in "
            f"{tokenizer.path}, whose token ids the reward model receives: use a reward model with the actor's "
            "tokenizer"
        )


def read_stream(path: Path, data: DataConfig, tokenizer: ChatTokenizer, *, seed: int) -> PromptStream:
    conversations = read_conversations(path, last="user")
    return PromptStream(
        conversations, tokenizer, seed=seed, max_prompt_tokens=data.max_prompt_tokens, shuffle=data.shuffle
    )


def check_context(tokenizer: ChatTokenizer, num_tokens: int, setting: str) -> None:
    """Raises DataError if `num_tokens` exceeds the maximum sequence length in the model's config."""
    limit = tokenizer.max_positions()
    if limit is not None and num_tokens > limit:
        raise DataError(
            f"{setting} is {num_tokens}, but the model in {tokenizer.path} supports at most {limit} tokens: lower it"
        )


class Examples:
    """Tokenized conversations for supervised fine-tuning. Raises DataError if a conversation is invalid or too long."""

    def __init__(self, path: Path, model: Path, *, max_tokens: int, max_examples: int | None = None) -> None:
        """Reads the first `max_examples` conversations of a JSON-lines file, or all if `max_examples` is None."""
        tokenizer = ChatTokenizer(model)
        check_context(tokenizer, max_tokens, "data.max_prompt_tokens")
        self._ids: list[list[int]] = []
        self._masks: list[list[bool]] = []
        for conversation in read_conversations(path, last="assistant")[:max_examples]:
            ids, mask = tokenizer.encode_example(conversation.messages)
            if len(ids) > max_tokens:
                raise DataError(
                    f"{conversation.location}: the conversation has {len(ids)} tokens, more than "
                    "data.max_prompt_tokens "
                    f"({max_tokens}): shorten it, or raise data.max_prompt_tokens"
                )
            self._ids.append(ids)
            self._masks.append(mask)

    def __len__(self) -> int:
        return len(self._ids)

    def batches(self, num_rows: int, *, seed: int, shuffle: bool, epochs: int | None = None) -> Iterator[Batch]:
        """Yields batches of `num_rows` examples, in an order that depends only on the seed and the epoch."""
        epoch = 0
        while epochs is None or epoch < epochs:
            order = np.random.default_rng([seed, epoch]).permutation(len(self)) if shuffle else np.arange(len(self))
            for start in range(0, len(self), num_rows):
                yield self.batch(order[start : start + num_rows])
            epoch += 1

    def batch(self, indices: np.ndarray | None = None) -> Batch:
        """Returns the examples at `indices`, or all examples."""
        indices = np.arange(len(self)) if indices is None else indices
        ids = [self._ids[index] for index in indices]
        tokens = {
            "input_ids": np.concatenate([np.asarray(row, dtype=np.int64) for row in ids]),
            "response_mask": np.concatenate([np.asarray(self._masks[index], dtype=bool) for index in indices]),
        }
        return Batch.from_columns(tokens=tokens, lengths=[len(row) for row in ids])
