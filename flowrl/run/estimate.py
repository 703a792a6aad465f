"""The adapter between batch columns and the pure functions of flowrl/algorithms: it runs beside the data."""

import torch
from tensordict import TensorDict

from flowrl.algorithms import (
    explained_variance,
    gae,
    grpo,
    kl_estimate,
    kl_shaped_rewards,
    last_masked,
    masked_mean,
    whiten,
)
from flowrl.config import AdvantageConfig
from flowrl.controller.future import Future
from flowrl.data.batch import Batch
from flowrl.data.block import LocalRef
from flowrl.data.metric import Max, Mean, Metric, Sum
from flowrl.data.table import lengths, make_table, pad_tokens, unpad_tokens


def estimate_advantages(batch: Batch, config: AdvantageConfig) -> Batch:
    """The batch with `token_rewards` and `advantages`, and for gae with `returns`. Does not wait.

    Reads `scores` and `response_mask`; gae reads `values`, and `old_logprobs` and `ref_logprobs` for its KL penalty;
    grpo reads `group`.
    """
    if config.estimator == "grpo":
        return batch.apply(
            grpo_columns, ("scores", "group", "response_mask"), ("token_rewards", "advantages"), config=config
        )
    reads = ["scores", "response_mask", "values"]
    if config.kl_coef:
        reads += ["old_logprobs", "ref_logprobs"]
    return batch.apply(gae_columns, reads, ("token_rewards", "advantages", "returns"), config=config)


def gae_columns(table: TensorDict, config: AdvantageConfig) -> TensorDict:
    """Token rewards, GAE advantages (whitened over the whole batch where configured) and returns."""
    lengths_B = lengths(table)
    padded = {name: pad_tokens(column_T, lengths_B) for name, column_T in table["tokens"].items()}
    mask_BT = padded["response_mask"]
    if config.kl_coef:
        rewards_BT = kl_shaped_rewards(
            table["rows", "scores"],
            padded["old_logprobs"],
            padded["ref_logprobs"],
            mask_BT,
            coef=config.kl_coef,
            kind=config.kl_kind,
        )
    else:
        rewards_BT = _scores_on_last_token(table["rows", "scores"], mask_BT)
    advantages_BT, returns_BT = gae(rewards_BT, padded["values"], mask_BT, gamma=config.gamma, lam=config.lam)
    if config.whiten:
        advantages_BT = whiten(advantages_BT, mask_BT)
    columns = {"token_rewards": rewards_BT, "advantages": advantages_BT, "returns": returns_BT}
    return make_table(tokens={n: unpad_tokens(c, lengths_B) for n, c in columns.items()}, lengths=lengths_B)


def grpo_columns(table: TensorDict, config: AdvantageConfig) -> TensorDict:
    """Token rewards, and advantages that compare a row's score with those of its group."""
    lengths_B = lengths(table)
    mask_BT = pad_tokens(table["tokens", "response_mask"], lengths_B)
    scores_B = table["rows", "scores"]
    columns = {
        "token_rewards": _scores_on_last_token(scores_B, mask_BT),
        "advantages": grpo(scores_B, table["rows", "group"], mask_BT, normalize_std=config.normalize_std),
    }
    return make_table(tokens={n: unpad_tokens(c, lengths_B) for n, c in columns.items()}, lengths=lengths_B)


def _scores_on_last_token(scores_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return scores_B[:, None] * last_masked(mask_BT)


def batch_metrics(batch: Batch) -> Future | LocalRef:
    """What a step's batch was like: reward, response length, KL to the reference, fit of the critic. Does not wait."""
    reads = ["scores", "response_mask", "truncated", "rollout_logprobs"]
    reads += [name for name in ("old_logprobs", "ref_logprobs", "values", "returns") if name in batch]
    return batch.reduce(measure, reads)


def measure(table: TensorDict) -> dict[str, Metric]:
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
    if "old_logprobs" in tokens:
        gap_BT = (tokens["old_logprobs"] - tokens["rollout_logprobs"]).abs()
        found["rollout_gap"] = Mean(float(masked_mean(gap_BT, mask_BT)) * count, count)
    if "old_logprobs" in tokens and "ref_logprobs" in tokens:
        kl_BT = kl_estimate(tokens["old_logprobs"], tokens["ref_logprobs"], kind="k3")
        found["kl"] = Mean(float(masked_mean(kl_BT, mask_BT)) * count, count)
    if "values" in tokens and "returns" in tokens:
        found["explained_variance"] = Mean(float(explained_variance(tokens["values"], tokens["returns"], mask_BT)), 1)
    return found
