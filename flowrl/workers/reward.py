"""Reward: what scores responses, a Python function or a model with a scalar head."""

import importlib
import inspect
import math
import traceback
from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import nn

from flowrl.config import RewardConfig, UserError
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import make_tensordict, num_rows, objects
from flowrl.engines.models.loading import load_reward_model
from flowrl.engines.train.engine import TrainEngine, is_sharded
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.model_worker import ModelWorker
from flowrl.workers.role_mesh import mesh_of, shares_model

RewardFunction = Callable[..., float]


class RewardError(UserError):
    """A reward function cannot be found, or did not return a finite number."""


def load_reward_function(name: str) -> RewardFunction:
    """The function that `module:function` names. Raises `RewardError`."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"reward function {name} cannot be loaded ({error}); name it as module:function") from error
    if not callable(function):
        raise RewardError(f"reward function {name} is a {type(function).__name__}, not a function")
    _check_signature(cast("RewardFunction", function), name)
    return cast("RewardFunction", function)  # its result is checked at every call


def score_rows(batch: TensorDict, function: RewardFunction, name: str) -> TensorDict:
    """Calls a reward function once per row, with the row's columns by name. Raises `RewardError`."""
    names = [column for column in batch["rows"].keys() if column != "length"]  # noqa: SIM118 (a TensorDict)
    columns = {column: objects(batch, column) for column in names}
    scores = []
    for i in range(num_rows(batch)):
        scores.append(_score(function, name, {column: values[i] for column, values in columns.items()}))
    return make_tensordict({"scores": torch.tensor(scores, dtype=torch.float32)})


def _score(function: RewardFunction, name: str, row: dict[str, Any]) -> float:
    asked = f"for prompt {row.get('prompt')!r}, response {row.get('response')!r} and answer {row.get('answer')!r}"
    try:
        value = function(**row)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise RewardError(f"reward function {name} raised {type(error).__name__}: {error}{where} {asked}") from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(f"reward function {name} returned {value!r} {asked}; return a finite number")
    return float(value)


def _check_signature(function: RewardFunction, name: str) -> None:
    try:
        inspect.signature(function).bind_partial(prompt="", response="", answer="")
    except TypeError as error:
        raise RewardError(
            f"reward function {name}{inspect.signature(function)} cannot be called by name ({error}); "
            f"write it as (prompt, response, answer, **columns)"
        ) from None


class Reward(Worker):
    """Scores rows by a Python function of `prompt, response, answer` and the dataset's other columns."""

    stateless = True

    def __init__(self, config: RewardConfig) -> None:
        assert config.function is not None
        self.name, self.evaluation_name = config.function, config.evaluation or config.function
        self._functions = {name: load_reward_function(name) for name in (self.name, self.evaluation_name)}

    @register(
        Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("prompt", "response", "answer?", "*"), writes=("scores",)
    )
    def score(self, batch: TensorDict, evaluation: bool = False) -> TensorDict:
        """One score `[B]` per row; `evaluation` uses the function for held-out rows."""
        name = self.evaluation_name if evaluation else self.name
        return score_rows(batch, self._functions[name], name)


class RewardModel(ModelWorker):
    """Scores rows by a sequence-classification model, read at the last token."""

    replicated = stateless = True

    def __init__(self, config: RewardConfig) -> None:
        assert config.model is not None
        mesh = mesh_of(self, config.engine)
        model = load_reward_model(
            config.model, head=config.head, seed=config.head_seed, on_meta=is_sharded(config.engine, mesh)
        )
        self.engine = TrainEngine(model, None, config.engine, mesh=mesh, device=torch.device(self.device))
        self._evaluation = load_reward_function(config.evaluation) if config.evaluation else None
        self._evaluation_name = config.evaluation or ""

    @classmethod
    def select_class(cls, mesh: Mesh, config: RewardConfig) -> type[Worker]:
        """As for `Reference`."""
        return _SharedRewardModel if shares_model(mesh, config.engine) else cls

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("input_ids", "prompt", "response", "answer?", "*"),
        writes=("scores",),
    )
    def score(self, batch: TensorDict, evaluation: bool = False) -> TensorDict:
        """One score `[B]` per row; `evaluation` uses the evaluation function where there is one."""
        if evaluation and self._evaluation is not None:
            return score_rows(batch, self._evaluation, self._evaluation_name)
        scores_B = self.engine.evaluate_rows(batch, _scores)
        return make_tensordict({"scores": scores_B.float()})


class _SharedRewardModel(RewardModel):
    collective, replicated, stateless = True, False, False


def reward_worker(config: RewardConfig) -> type[Worker]:
    """The worker class that a reward's config asks for."""
    return Reward if config.model is None else RewardModel


def _scores(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    return model(micro.input_ids, micro.lengths, micro.pack)
