"""Reward workers, which score rows with a Python function or a reward model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import nn

from flowrl.config import RewardConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict, num_rows, objects
from flowrl.data.chat import ChatTokenizer, Message, has_same_rendering
from flowrl.data.input_paths import MAX_POSITIONS
from flowrl.engines.models.loading import load_reward_model
from flowrl.engines.train.engine import TrainEngine, is_sharded
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.rewards.reward_function import RewardFunction, accepted_columns, load_reward_function, score_row
from flowrl.workers.model_worker import ModelWorker, build_rank_mesh, has_collective_forward

if TYPE_CHECKING:
    from flowrl.workers.groups import RewardGroup, RewardModelGroup

_FUNCTION_COLUMNS = ("prompt", "response", "answer?", "data_source?", "conversation?", "*")
"""Columns that a reward function receives. `?` marks an optional column, and `*` stands for all other dataset
columns.
"""


def score_rows(batch: TensorDict, function: RewardFunction, name: str) -> TensorDict:
    """Calls a reward function once per row, with the columns that it accepts. Returns the column `scores`.

    Raises RewardError if the function raises an exception or does not return a finite number.
    """
    names = batch["rows"].keys()
    accepted = accepted_columns(function, [column for column in names if column != "length"])
    columns = {column: objects(batch, column) for column in accepted}
    rows = ({column: values[i] for column, values in columns.items()} for i in range(num_rows(batch)))
    scores = [score_row(function, name, row) for row in rows]
    return make_tensordict({"scores": torch.tensor(scores, dtype=torch.float32)})


class Reward(Worker["RewardGroup"]):
    """Worker that scores rows with a Python function of `prompt`, `response`, `answer` and other dataset columns.

    With `config.model`, a reward model scores the rows instead (`RewardModel`).
    """

    stateless = True

    def __init__(self, config: RewardConfig) -> None:
        assert config.function is not None
        self.name, self.evaluation_name = config.function, config.evaluation or config.function
        self._functions = {name: load_reward_function(name) for name in (self.name, self.evaluation_name)}

    @classmethod
    def select_class(cls, mesh: Mesh, config: RewardConfig) -> type[Worker]:
        return cls if config.model is None else RewardModel.select_class(mesh, config)

    @classmethod
    def user_functions(cls, config: RewardConfig, *_: Any, **__: Any) -> tuple[str, ...]:  # Any: the constructor's
        return _unique_names(config.function, config.evaluation)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=_FUNCTION_COLUMNS, writes=("scores",))
    def score(self, batch: TensorDict, evaluation: bool = False) -> TensorDict:
        """Returns one score per row, `[B]`. `evaluation` selects the evaluation function."""
        name = self.evaluation_name if evaluation else self.name
        return score_rows(batch, self._functions[name], name)


class RewardModel(ModelWorker["RewardModelGroup"]):
    """Worker that scores rows with a sequence-classification model."""

    replicated = stateless = True

    def __init__(self, config: RewardConfig) -> None:
        assert config.model is not None
        mesh = build_rank_mesh(self, config.engine)
        model = load_reward_model(
            config.model, head=config.head, seed=config.head_seed, on_meta=is_sharded(config.engine, mesh)
        )
        self.engine = TrainEngine(model, None, config.engine, mesh=mesh, device=torch.device(self.device))
        settings = model.model.config.get_text_config().to_dict()
        self._max_tokens: int | None = next((settings[name] for name in MAX_POSITIONS if name in settings), None)
        self._tokenizer = self._choose_tokenizer(config)
        self._evaluation = load_reward_function(config.evaluation) if config.evaluation else None
        self._evaluation_name = config.evaluation or ""

    @classmethod
    def select_class(cls, mesh: Mesh, config: RewardConfig) -> type[Worker]:
        """Returns the subclass with `collective = True` if several ranks must run a forward pass together. Such ranks
        cannot be restarted separately.
        """
        return _CollectiveRewardModel if has_collective_forward(mesh, config.engine) else cls

    @classmethod
    def user_functions(cls, config: RewardConfig, *_: Any, **__: Any) -> tuple[str, ...]:  # Any: the constructor's
        return _unique_names(config.evaluation)

    @staticmethod
    def _choose_tokenizer(config: RewardConfig) -> ChatTokenizer | None:
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
        reads=("input_ids", "truncated?", *_FUNCTION_COLUMNS),
        writes=("scores", "reward_truncated"),
        balance="tokens",
    )
    def score(self, batch: TensorDict, evaluation: bool = False) -> TensorDict:
        """Returns one score per row, `[B]`. `evaluation` selects the evaluation function, if the settings name one.

        `reward_truncated` is true for rows that are longer than the model supports. Only their last tokens are scored.
        """
        is_truncated_B = torch.zeros(num_rows(batch), dtype=torch.bool)
        if evaluation and self._evaluation is not None:
            scores = score_rows(batch, self._evaluation, self._evaluation_name)
            return make_tensordict({"scores": scores["rows", "scores"], "reward_truncated": is_truncated_B})
        if self._tokenizer is not None:
            batch = render_again(batch, self._tokenizer)
        if self._max_tokens is not None:
            is_truncated_B = lengths(batch) > self._max_tokens
            batch = cut_rows(batch, self._max_tokens) if is_truncated_B.any() else batch
        scores_B = self.engine.evaluate_rows(batch, row_scores)
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


def _unique_names(*names: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name is not None))


def row_scores(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """Returns the score of each row of a micro-batch, [B]."""
    return model(micro.input_ids, micro.lengths, micro.pack)
