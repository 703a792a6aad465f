"""Reward workers, which score rows with Python functions (`Reward`) or a reward model (`RewardModel`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from flowrl.config import RewardConfig, ScoringModelConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Arguments, Contract, Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict, num_rows, objects
from flowrl.data.chat import ChatTokenizer, Message, has_same_rendering
from flowrl.engines.models.loading import max_positions
from flowrl.engines.train.base import Outputs
from flowrl.rewards.row_scorer import CALLS, FAILED, RowScorer
from flowrl.workers.episodes import score_columns
from flowrl.workers.model_worker import ModelWorker, has_collective_forward, start_engine
from flowrl.workers.serving_worker import ServingWorker

if TYPE_CHECKING:
    from flowrl.workers.groups import RewardGroup, RewardModelGroup

_FUNCTION_COLUMNS = ("prompt", "response", "answer?", "data_source?", "conversation?", "*")
"""Columns that a reward function receives. `?` marks an optional column, and `*` stands for all other dataset
columns.
"""

_RESPONSE_COLUMNS = ("input_ids?", "response_mask?", "truncated?", "tagged_response?")
"""Columns from which a reward function receives `token_ids`, `finish_reason` and `tagged_response`."""


def score_rows(scorer: RowScorer, batch: TensorDict, names: Sequence[str], *, evaluation: bool) -> TensorDict:
    """Calls reward functions for all rows. Returns the columns `names`, `reward_failed` and `reward_calls`.

    Raises RewardError if a call fails and `on_failure` is stop.
    """
    columns = {name: objects(batch, name) for name in batch["rows"].keys() if name != "length"}  # noqa: SIM118 (a TensorDict)
    columns |= _response_columns(batch)
    rows = [{name: values[i] for name, values in columns.items()} for i in range(num_rows(batch))]
    futures = [scorer.submit(row, evaluation=evaluation) for row in rows]
    return make_tensordict(score_columns([future.result() for future in futures], names))


def _response_columns(batch: TensorDict) -> dict[str, list]:
    """Returns `token_ids`, `finish_reason` and `tagged_response` of responses that a rollout has generated."""
    tokens, columns = batch["tokens"], {}
    if "tagged_response" in batch["rows"].keys():  # noqa: SIM118 (a TensorDict)
        texts = zip(objects(batch, "response"), objects(batch, "tagged_response"), strict=True)
        columns["tagged_response"] = [text if tagged is None else tagged for text, tagged in texts]
    if "truncated" in batch["rows"].keys():  # noqa: SIM118 (a TensorDict)
        columns["finish_reason"] = ["length" if value else "stop" for value in batch["rows", "truncated"].tolist()]
    if {"input_ids", "response_mask"} <= set(tokens.keys()):
        sizes = lengths(batch).tolist()
        rows = zip(tokens["input_ids"].split(sizes), tokens["response_mask"].split(sizes), strict=True)
        # The first token of a response is always a token of the policy.
        columns["token_ids"] = [ids_T[int(mask_T.int().argmax()) :].tolist() for ids_T, mask_T in rows]
    return columns


def add_score_columns(contract: Contract, cls: type[Worker], arguments: Arguments, config: RewardConfig) -> Contract:
    """Returns the contract of `Reward.score`, whose columns depend on the settings, for `register(resolve=...)`."""
    evaluation = bool(arguments.get("evaluation", False))
    return replace(contract, writes=(*config.function_columns(evaluation=evaluation), FAILED, CALLS))


def select_score_columns(
    contract: Contract, cls: type[Worker], arguments: Arguments, config: ScoringModelConfig
) -> Contract:
    """Returns the contract of `RewardModel.score`. With functions for evaluations, it has their columns."""
    if isinstance(config, RewardConfig) and config.evaluation is not None and arguments.get("evaluation", False):
        return add_score_columns(contract, cls, arguments, config)
    return contract


SCORES = Outputs(("scores",))
"""The score of each row at its last token."""


class Reward(ServingWorker["RewardGroup"]):
    """Worker that scores rows with Python functions of `prompt`, `response`, `answer` and other dataset columns.

    The functions run in separate processes. With `config.model`, a reward model scores the rows instead
    (`RewardModel`).
    """

    stateless = True

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.service = self._scorer = RowScorer(config, workers=-(-config.workers // self.world_size))

    @classmethod
    def select_class(cls, mesh: Mesh, config: ScoringModelConfig) -> type[Worker]:
        return cls if config.model is None else RewardModel.select_class(mesh, config)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=(*_RESPONSE_COLUMNS, *_FUNCTION_COLUMNS),
        writes=("scores", FAILED, CALLS),
        memory=(),
        resolve=add_score_columns,
    )
    def score(self, batch: TensorDict, evaluation: bool = False) -> TensorDict:
        """Returns one score per row, `[B]`, in the columns of `RewardConfig.function_columns`.

        `reward_failed` is true if a call failed, and `reward_calls` has duration and failure of each call. `evaluation`
        selects the rewards of evaluations. Raises RewardError if a call fails and `on_failure` is stop.
        """
        names = self._config.function_columns(evaluation=evaluation)
        return score_rows(self._scorer, batch, names, evaluation=evaluation)


class RewardModel(ModelWorker["RewardModelGroup"]):
    """Worker that scores rows with a sequence-classification model."""

    replicated = stateless = True

    def __init__(self, config: ScoringModelConfig) -> None:
        assert config.model is not None
        self.engine = start_engine(self, "reward_model", config)
        self._max_tokens = max_positions(config.model)
        self._tokenizer = self._choose_tokenizer(config)
        self._evaluation, self._evaluation_columns = None, ()
        if isinstance(config, RewardConfig) and config.evaluation is not None:
            self._evaluation_columns = config.function_columns(evaluation=True)
            self._evaluation = RowScorer(config, workers=-(-config.workers // self.world_size))

    @classmethod
    def select_class(cls, mesh: Mesh, config: ScoringModelConfig) -> type[Worker]:
        """Returns the subclass with `collective = True` if several ranks must run a forward pass together. Such ranks
        cannot be restarted separately.
        """
        return _CollectiveRewardModel if has_collective_forward(mesh, config.engine) else cls

    @register(Dispatch.ONE_TO_ALL, memory=())
    def find_missing_protections(self) -> tuple[str, tuple[str, ...]]:
        """Returns the address of the node, and the protections that it does not offer to functions of evaluations."""
        return self.context.address, () if self._evaluation is None else self._evaluation.find_missing_protections()

    def close(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()

    @staticmethod
    def _choose_tokenizer(config: ScoringModelConfig) -> ChatTokenizer | None:
        """Returns the reward model's tokenizer, if it encodes a conversation differently from that of the policy.

        Returns None if the reward model can read the tokens of the policy.
        """
        assert config.model is not None
        policy, own = config.policy_tokenizer, config.model.tokenizer_path
        if policy is None or has_same_rendering(policy, own, config.policy_template):
            return None
        return ChatTokenizer(own, model=config.model.path)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("input_ids", *_RESPONSE_COLUMNS[1:], *_FUNCTION_COLUMNS),
        writes=("scores", "reward_truncated"),
        balance="tokens",
        resolve=select_score_columns,
    )
    def score(self, batch: TensorDict, evaluation: bool = False) -> TensorDict:
        """Returns one score per row, `[B]`, which may be NaN or infinite.

        `evaluation` selects the functions for evaluations, if there are any, with the columns of `Reward.score`.
        `reward_truncated` is true for rows that are longer than the model supports. Only their last tokens are scored.
        """
        if evaluation and self._evaluation is not None:
            return score_rows(self._evaluation, batch, self._evaluation_columns, evaluation=True)
        is_truncated_B = torch.zeros(num_rows(batch), dtype=torch.bool)
        if self._tokenizer is not None:
            batch = render_again(batch, self._tokenizer)
        if self._max_tokens is not None:
            is_truncated_B = lengths(batch) > self._max_tokens
            batch = cut_rows(batch, self._max_tokens) if is_truncated_B.any() else batch
        scores_B = self.engine.forward(batch, SCORES)["scores"]
        return make_tensordict({"scores": scores_B.float(), "reward_truncated": is_truncated_B})


def render_again(batch: TensorDict, tokenizer: ChatTokenizer) -> TensorDict:
    """Renders each conversation and its response for another tokenizer and chat template. Returns `input_ids`.

    A truncated response has no end token, as in the policy's tokens.
    """
    is_truncated_B = batch["rows"].get("truncated", torch.zeros(num_rows(batch), dtype=torch.bool)).tolist()
    texts = zip(objects(batch, "conversation"), objects(batch, "response"), is_truncated_B, strict=True)
    rows = []
    for conversation, response, is_truncated in texts:
        messages = [Message(turn["role"], turn["content"]) for turn in conversation]
        rows.append(tokenizer.encode_for_score(messages, response, is_truncated=is_truncated))
    return _make_rows(rows)


def cut_rows(batch: TensorDict, limit: int) -> TensorDict:
    """Returns the last `limit` tokens of each row, so that the model scores the end of the turn, as in training."""
    return _make_rows(
        [ids_L[-limit:].tolist() for ids_L in batch["tokens", "input_ids"].split(lengths(batch).tolist())]
    )


def _make_rows(rows: Sequence[Sequence[int]]) -> TensorDict:
    tokens = {"input_ids": torch.tensor([token for row in rows for token in row], dtype=torch.int64)}
    return make_tensordict(tokens=tokens, lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64))


class _CollectiveRewardModel(RewardModel):
    collective, replicated, stateless = True, False, False
