"""The adapter between batch columns and the pure functions of flowrl/algorithms: it runs beside the data."""

from collections.abc import Iterable

import torch
from tensordict import TensorDict

from flowrl.algorithms import (
    explained_variance,
    kl_estimate,
    kl_shaped_rewards,
    last_masked,
    masked_mean,
    whiten,
)
from flowrl.algorithms.registry import advantage_estimators, kl_kinds
from flowrl.config import AdvantageConfig, UserError
from flowrl.controller.future import Future
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import lengths, make_tensordict, pad_tokens, unpad_tokens
from flowrl.data.metric import Max, Mean, Metric, Sum
from flowrl.data.returned_values import described
from flowrl.run.loss_columns import correct_rollouts, correction_metrics
from flowrl.run.reward_shaping import shaped_rewards, shaping_columns
from flowrl.run.step_state import AlgorithmState, State, carries, first_state

INPUT_COLUMNS = {
    "mask": "response_mask",
    "scores": "scores",
    "rewards": "scores",
    "groups": "group",
    "values": "values",
    "logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "greedy_scores": "greedy_scores",
    "sum_squared_probs": "sum_squared_probs",
    "importance_weights": "loss_weights",
}
"""Input of an estimator -> the column that it is, or is made of."""

COLUMN_MAKERS = {
    "greedy_scores": "the score of an answer to the row's prompt that was decoded without sampling",
    "sum_squared_probs": "per token the sum over the vocabulary of the actor's squared probabilities",
}
"""Columns that a recipe must compute for an estimator which no shipped recipe drives."""


def estimate_advantages(batch: Batch, config: AdvantageConfig, state: State | None = None) -> Batch:
    """The batch with `token_rewards` and `advantages`, and from an estimator with a critic `returns`. Does not wait.

    Reads `response_mask` and what the estimator takes as its inputs (`INPUT_COLUMNS`); for a KL penalty `old_logprobs`
    and `ref_logprobs`. With a correction it reads `rollout_logprobs` too, and adds `loss_weights` and `loss_mask`. With
    shaping it adds `shaped_scores`, and takes them where it would take `scores`.

    Args:
        state: of flowrl/run/step_state.py, for algorithms that carry something from step to step.

    Raises: UserError for a column that is read and that the batch has not, and for an algorithm that needs a state.
    """
    if state is None:
        if carries(config):
            raise UserError(
                "algorithm has settings that depend on the steps before, but this recipe keeps no state: pass "
                "Carried.now (flowrl/run/step_state.py) to estimate_advantages, or remove them"
            )
        state = first_state(config)
    if config.shaping:
        reads = shaping_columns(config.shaping)
        _check_columns(batch, reads, "algorithm.shaping")
        batch = batch.apply(shape_scores, reads, ("shaped_scores",), config=config, state=state)
    if config.applied_correction is not None:
        batch = correct_rollouts(batch, config.applied_correction)
    inputs = advantage_estimators.inputs(advantage_estimators.load(config.estimator))
    reads = dict.fromkeys(INPUT_COLUMNS[name] for name in inputs if name != "importance_weights")
    if config.reward_columns is not None:
        reads = dict.fromkeys((*(name for name in reads if name != "scores"), *config.reward_columns))
    else:
        reads |= {"scores": None}
    reads = dict.fromkeys(_score_column(config) if name == "scores" else name for name in reads)
    if config.kl_coef:
        reads |= {"old_logprobs": None, "ref_logprobs": None}
    if "importance_weights" in inputs and "loss_weights" in batch:
        reads |= {"loss_weights": None}
    _check_columns(batch, reads, f"algorithm.estimator {config.estimator}")
    writes = ("token_rewards", "advantages", *(("returns",) if "values" in inputs else ()))
    return batch.apply(advantage_columns, list(reads), writes, config=config, state=state)


def _check_columns(batch: Batch, reads: Iterable[str], who: str) -> None:
    for name in reads:
        if name not in batch:
            meaning = f", {COLUMN_MAKERS[name]}" if name in COLUMN_MAKERS else ""
            raise UserError(
                f"{who} reads the column {name}{meaning}; the batch has none: "
                f"store it in the recipe before the advantages, or choose another setting"
            )


def shape_scores(table: TensorDict, config: AdvantageConfig, state: AlgorithmState) -> TensorDict:
    """The scores after every shaping, in the order of the config."""
    return make_tensordict({"shaped_scores": shaped_rewards(table, config.shaping, state.moments)[0]})


def _score_column(config: AdvantageConfig) -> str:
    return "shaped_scores" if config.shaping else "scores"


def advantage_columns(table: TensorDict, config: AdvantageConfig, state: AlgorithmState) -> TensorDict:
    """Token rewards, advantages (whitened over the whole batch where configured), and returns for a critic."""
    lengths_B = lengths(table)
    padded = {name: pad_tokens(column_T, lengths_B) for name, column_T in table["tokens"].items()}
    mask_BT = padded["response_mask"]
    scores = _scores(table, config)
    rewards_BT = _token_rewards(_one_score(scores, config), padded, mask_BT, config, state.kl_control.coef)
    if config.kl_coef:
        scores = rewards_BT.sum(-1)
    rows = {name: column for name, column in table["rows"].items() if isinstance(column, torch.Tensor)}
    found = {name: (padded | rows).get(column) for name, column in INPUT_COLUMNS.items()}
    found |= {"mask": mask_BT, "scores": scores, "rewards": rewards_BT}
    estimator = advantage_estimators.load(config.estimator)
    inputs = {name: found[name] for name in advantage_estimators.inputs(estimator) if found[name] is not None}
    result = estimator(**inputs, **_options(config))
    columns = {"token_rewards": rewards_BT} | _advantages_and_returns(result, "values" in inputs, mask_BT, config)
    return make_tensordict(tokens={n: unpad_tokens(c, lengths_B) for n, c in columns.items()}, lengths=lengths_B)


def _options(config: AdvantageConfig) -> dict[str, object]:
    """The keyword arguments of the estimator's function."""
    settings = config.settings()
    if "options" in settings:
        return dict(settings["options"])
    if "reward_weights" in settings:
        return {"weights": settings["reward_weights"]}
    return {name: value for name, value in settings.items() if not name.startswith(("whiten", "kl_"))}


def _scores(table: TensorDict, config: AdvantageConfig) -> torch.Tensor:
    """[B], or for several rewards [B, K]."""
    if config.reward_columns is None:
        return table["rows", _score_column(config)]
    names = [_score_column(config) if name == "scores" else name for name in config.reward_columns]
    return torch.stack([table["rows", name].float() for name in names], dim=-1)


def _one_score(scores: torch.Tensor, config: AdvantageConfig) -> torch.Tensor:
    """[B]: several rewards by their weights."""
    if config.reward_columns is None:
        return scores
    weights_K = torch.tensor(config.reward_weights or [1.0] * scores.shape[1])
    return scores @ weights_K.to(scores)


def _token_rewards(
    scores_B: torch.Tensor,
    padded: dict[str, torch.Tensor],
    mask_BT: torch.Tensor,
    config: AdvantageConfig,
    kl_coef: float,
) -> torch.Tensor:
    """The score on the last token, and where there is a penalty the KL off every one."""
    if not config.kl_coef:
        return torch.where(last_masked(mask_BT), scores_B[:, None], 0)
    assert config.kl_kind is not None
    return kl_shaped_rewards(
        scores_B,
        padded["old_logprobs"],
        padded["ref_logprobs"],
        mask_BT,
        coef=kl_coef,
        kind=kl_kinds.load(config.kl_kind),
    )


def _advantages_and_returns(
    result: object, has_critic: bool, mask_BT: torch.Tensor, config: AdvantageConfig
) -> dict[str, torch.Tensor]:
    """The result of an estimator by name, checked: it may be a user's own."""
    columns = list(result) if has_critic and isinstance(result, tuple) else [result]
    names = ("advantages", "returns") if has_critic else ("advantages",)
    fits = len(columns) == len(names)
    if not fits or not all(isinstance(c, torch.Tensor) and c.shape == mask_BT.shape for c in columns):
        raise UserError(
            f"algorithm.estimator {config.estimator} returned {described(result)}, it must return "
            f"{' and '.join(names)}, {'each ' if has_critic else ''}of shape {list(mask_BT.shape)}"
        )
    found = {name: column for name, column in zip(names, columns, strict=True) if isinstance(column, torch.Tensor)}
    if config.whiten:
        found["advantages"] = whiten(found["advantages"], mask_BT)
    return found


MEASURED = (
    "old_logprobs",
    "ref_logprobs",
    "values",
    "returns",
    "loss_weights",
    "loss_mask",
    "behavior_logprobs",
    "shaped_scores",
)
"""Columns that have metrics where a batch has them."""


def batch_metrics(batch: Batch, state: State | None = None) -> Future | LocalRef:
    """What a step's batch was like: reward, response length, KL to the reference, fit of the critic. Does not wait.

    With the state that its advantages were made with it tells the coefficient of the KL penalty too.
    """
    reads = ["scores", "response_mask", "truncated", "rollout_logprobs"]
    reads += [name for name in MEASURED if name in batch]
    return batch.reduce(measure, reads, state=state)


def measure(table: TensorDict, state: AlgorithmState | None = None) -> dict[str, Metric]:
    """The metrics of `batch_metrics`; docs/metrics.md says what each is."""
    lengths_B = lengths(table)
    tokens = {name: pad_tokens(column_T, lengths_B) for name, column_T in table["tokens"].items()}
    mask_BT, scores_B = tokens["response_mask"], table["rows", "scores"]
    rows, count = len(scores_B), float(mask_BT.sum())
    found: dict[str, Metric] = {
        "reward": Mean(float(scores_B.sum()), rows),
        "reward_max": Max(float(scores_B.max())),
        "response_length": Mean(count, rows),
        "response_tokens": Sum(count),
        "truncated_fraction": Mean(float(table["rows", "truncated"].sum()), rows),
    }
    if "shaped_scores" in table["rows"].keys():  # noqa: SIM118 (a TensorDict)
        found["reward_shaping"] = Mean(float((table["rows", "shaped_scores"] - scores_B).sum()), rows)
    if "old_logprobs" in tokens:
        gap_BT = (tokens["old_logprobs"] - tokens["rollout_logprobs"]).abs()
        found["rollout_gap"] = Mean(float(masked_mean(gap_BT, mask_BT)) * count, count)
        found["rollout_gap_max"] = Max(float(gap_BT.masked_fill(~mask_BT, 0).max()))
    if "old_logprobs" in tokens and "ref_logprobs" in tokens:
        kl_BT = kl_estimate(tokens["old_logprobs"], tokens["ref_logprobs"], kind="k3")
        found["kl"] = Mean(float(masked_mean(kl_BT, mask_BT)) * count, count)
    if state is not None and state.kl_control.coef:
        found["kl_coef"] = Mean(state.kl_control.coef, 1)
    if "values" in tokens and "returns" in tokens:
        found["explained_variance"] = Mean(float(explained_variance(tokens["values"], tokens["returns"], mask_BT)), 1)
    if "loss_weights" in tokens or "behavior_logprobs" in tokens:
        found |= correction_metrics(tokens)
    return found
