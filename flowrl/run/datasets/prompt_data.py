"""Training and evaluation prompts of a run, and the columns that its reward and environment functions require."""

import logging
from collections.abc import Sequence
from typing import Any

from flowrl.config import DataConfig, ReferenceConfig, RolloutRunConfig, ScoringModelConfig, models_of
from flowrl.data.batch.batch import Batch
from flowrl.data.chat import ChatTokenizer, compare_vocabularies, has_same_rendering
from flowrl.data.messages import DataError
from flowrl.data.preparation.tokenized_rows import TokenizedRow
from flowrl.data.prompts import PromptSet, PromptStream, TokenizedPrompt, tokenize_prompts
from flowrl.data.reading import reader
from flowrl.data.turn_delta import check_turn_template
from flowrl.environments.base import EnvironmentLoadError, create_environment
from flowrl.run.datasets.reward_columns import check_columns, columns_of_all_rows
from flowrl.run.datasets.tokenized_data import (
    Concatenated,
    SelectedRows,
    check_context,
    check_weights,
    names_of,
    open_prepared,
    read_files,
    read_tokenizer,
    warn_of_unknown_tokens,
)

_logger = logging.getLogger(__name__)


def read_prompts(config: RolloutRunConfig) -> tuple[PromptStream, dict[str, Batch]]:
    """Returns the training prompts, and the held-out prompts of each evaluation set by its name.

    Raises DataError if a row or a setting is invalid, or if a row lacks a column that a reward or environment function
    requires. Also raises it if a frozen policy has a different vocabulary from the actor, or if the chat template
    cannot continue a conversation with the environment. Warns if more than 1 % of the tokens are unknown to the
    tokenizer, or if no column provides a reward function's parameter that has a default.
    """
    tokenizer = _read_checked_tokenizer(config)
    reward = config.reward_settings
    training = () if reward is None else reward.training_components
    train = read_stream(
        config.data.training_files,
        config.data,
        tokenizer,
        seed=config.seed,
        needs=columns_of_all_rows(training),
        order=config.data.order,
        difficulty=config.data.difficulty,
        samples=config.samples_per_prompt,
    )
    check_columns(training, train, names_of(config.data.training_files))
    return train, _read_sets(config, tokenizer)


def read_held_out(config: RolloutRunConfig) -> dict[str, Batch]:
    """Returns the held-out prompts of each evaluation set by its name. Does not read the training data.

    Errors and warnings are those of `read_prompts`.
    """
    return _read_sets(config, _read_checked_tokenizer(config))


def _read_sets(config: RolloutRunConfig, tokenizer: ChatTokenizer) -> dict[str, Batch]:
    reward = config.reward_settings
    evaluation = () if reward is None else reward.evaluation_components
    needs = columns_of_all_rows(evaluation)
    held_out: dict[str, Batch] = {}
    for name, files in config.data.evaluation_files.items():
        prompts = read_stream(files, config.data, tokenizer, seed=config.seed, needs=needs)
        check_columns(evaluation, prompts, names_of(reader.as_files(files)))
        held_out[name] = Batch.from_rows(prompts.evaluation_rows(config.data.num_evaluation_rows(name)))
    return held_out


def _read_checked_tokenizer(config: RolloutRunConfig) -> ChatTokenizer:
    """Returns the tokenizer of the policy. Raises DataError if it does not fit the settings or the other models."""
    try:
        tokenizer = read_tokenizer(config.actor.model, config.data)
    except DataError as error:
        raise DataError(f"actor.model.path: {error}") from error
    for i, stop in enumerate(config.rollout.stop_ids):
        for token in stop:
            if token >= len(tokenizer):
                raise DataError(
                    f"rollout.stop_ids.{i} has the token {token}, which is not in the vocabulary of "
                    f"{tokenizer.path}: use ids from 0 to {len(tokenizer) - 1}"
                )
    _check_stop_ids(tokenizer, config)
    _check_vocabularies(config)
    _check_turns(tokenizer, config)
    for role, value in models_of(config).items():
        if isinstance(value, ScoringModelConfig):
            _check_reward_tokenizer(role, value)
    max_tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    check_context(tokenizer, max_tokens, "data.max_prompt_tokens + rollout.max_response_tokens")
    return tokenizer


def _check_reward_tokenizer(role: str, reward: ScoringModelConfig) -> None:
    """Raises DataError if a reward model needs its own rendering of conversations, but has no chat template."""
    model, policy = reward.model, reward.policy_tokenizer
    if model is None or policy is None:
        return
    try:
        if not has_same_rendering(policy, model.tokenizer_path, reward.policy_template):
            ChatTokenizer(model.tokenizer_path).check_chat_template()
    except DataError as error:
        raise DataError(f"{role}.model.path: {error}") from error


def _check_vocabularies(config: RolloutRunConfig) -> None:
    """Raises DataError if the vocabulary of a frozen policy, such as a teacher, differs from that of the actor."""
    for role, value in config.role_settings.items():
        if not isinstance(value, ReferenceConfig) or value.model.path == config.actor.model.path:
            continue
        try:
            difference = compare_vocabularies(config.actor.model.tokenizer_path, value.model.tokenizer_path)
        except DataError as error:
            raise DataError(f"{role}.model.path: {error}") from error
        if difference is not None:
            raise DataError(
                f"{role}.model.path is {value.model.path}, whose vocabulary differs from that of the actor "
                f"({difference}): use a model with the same tokenizer"
            )


def _check_stop_ids(tokenizer: ChatTokenizer, config: RolloutRunConfig) -> None:
    """Raises DataError if the rollout lacks the stop tokens with which `data.template` ends the assistant's turn.
    Without them, generation would continue after the turn.
    """
    rollout, stops = config.rollout, tokenizer.stop_ids
    if rollout.template == config.data.template:
        return
    own = ChatTokenizer(tokenizer.path, rollout.template)
    if missing := [list(ids) for ids in stops if ids not in (*rollout.stop_ids, *own.stop_ids)]:
        template = config.data.template
        source = f"the template in {tokenizer.path}" if template is None else f"data.template {template}"
        raise DataError(
            f"rollout.template {rollout.template} has no stop_ids {missing}, with which a response ends in {source}: "
            f"omit rollout.template, or add them to rollout.stop_ids"
        )


def _check_turns(tokenizer: ChatTokenizer, config: RolloutRunConfig) -> None:
    """Raises DataError if the environment cannot be created, or if the chat template rewrites earlier turns when
    messages of the environment follow.
    """
    if config.environment is None:
        return
    try:
        environment = create_environment(config.environment.name, config.environment.options)
        if roles := getattr(environment, "observation_roles", ()):
            check_turn_template(tokenizer, roles, getattr(environment, "tools", ()))
    except (EnvironmentLoadError, DataError) as error:
        raise DataError(f"environment.name: {error}") from error


def read_stream(
    files: reader.Files,
    data: DataConfig,
    tokenizer: ChatTokenizer,
    *,
    seed: int,
    needs: Sequence[str] = (),
    **selection: Any,  # Any: see `PromptStream`
) -> PromptStream:
    """Returns the prompts of files or prepared folders. `selection` are arguments of `PromptStream`, such as `order`.

    Raises DataError if a row is invalid or lacks a column in `needs`.
    """
    sources = reader.as_files(files)
    if prepared := open_prepared(sources, tokenizer, "prompts", data):
        for folder, _ in prepared:
            folder.check_columns(needs)
        rows = _PreparedPrompts([SelectedRows(folder, data.max_prompt_tokens) for folder, _ in prepared])
        names = dict.fromkeys(name for folder, _ in prepared for name in folder.columns)
        parts = tuple((len(part), weight) for part, (_, weight) in zip(rows.parts, prepared, strict=True))
        check_weights(sources, parts)
        return PromptStream.from_prompts(PromptSet(rows, tuple(names), parts), seed=seed, **selection)
    conversations, parts = read_files(sources, data, "prompts", needs)
    prompts = tokenize_prompts(
        conversations,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        too_long=data.too_long,
        parts=parts,
        strict=data.strict,
    )
    check_weights(sources, prompts.weighted_parts)
    warn_of_unknown_tokens(conversations, tokenizer)
    return PromptStream.from_prompts(prompts, seed=seed, **selection)


class _PreparedPrompts(Sequence[TokenizedPrompt]):
    """The prompts of several prepared folders."""

    def __init__(self, parts: Sequence[Sequence[TokenizedRow]]) -> None:
        self.parts = parts
        self._rows = Concatenated(parts)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:  # Any: a prompt, for an int
        row = self._rows[index]
        return TokenizedPrompt(row.conversation, row.sides[0].ids)
