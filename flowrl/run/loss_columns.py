"""What a policy loss or a correction must know of the whole batch, as columns that go with its rows.

Shape suffixes: B rows, L the longest row.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from flowrl.algorithms import (
    RatioLevel,
    last_masked,
    mismatch_metrics,
    normalized_weights,
    select_clip_cov,
    select_kl_cov,
    token_covariances,
    weight_sums,
)
from flowrl.algorithms.losses.surrogates import bounded_ratio
from flowrl.algorithms.registry import policy_losses, rollout_corrections
from flowrl.config import ActorConfig, CorrectionConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.tensordicts import lengths, make_tensordict, pad_tokens, unpad_tokens
from flowrl.data.metric import Mean, Metric
from flowrl.data.returned_values import weights_or_mask


def loss_columns(batch: Batch, config: ActorConfig, *, seed: Sequence[int]) -> Batch:
    """The batch with what the actor's loss reads beside the columns of every loss. Does not wait.

    `behavior_logprobs` are the rollout's; `selected`, for clip_cov and kl_cov, is decided here: over the whole
    batch, not over minibatches. Most losses need neither, and get the batch as it is.

    Args:
        batch: with `advantages`.
        config: the loss.
        seed: of clip_cov's draw; (seed of the run, step) draws anew in every step.
    """
    reads = policy_losses.inputs(policy_losses.load(config.loss))
    if "behavior_logprobs" in reads:
        batch = batch.union(batch.select("rollout_logprobs").rename({"rollout_logprobs": "behavior_logprobs"}))
    if config.loss in ("clip_cov", "kl_cov"):
        columns = ("old_logprobs", "advantages", "response_mask")
        batch = batch.apply(select_tokens, columns, ("selected",), config=config, seed=tuple(seed))
    return batch


def select_tokens(table: TensorDict, config: ActorConfig, seed: Sequence[int]) -> TensorDict:
    """The tokens of the whole batch that the loss treats apart."""
    lengths_B = lengths(table)
    padded = {name: pad_tokens(column_T, lengths_B) for name, column_T in table["tokens"].items()}
    mask_BL = padded["response_mask"]
    covariances_BL = token_covariances(padded["old_logprobs"], padded["advantages"], mask_BL)
    assert config.cov_fraction is not None
    if config.loss == "kl_cov":
        selected_BL = select_kl_cov(covariances_BL, mask_BL, fraction=config.cov_fraction)
    else:
        assert config.cov_low is not None and config.cov_high is not None
        selected_BL = select_clip_cov(
            covariances_BL,
            mask_BL,
            fraction=config.cov_fraction,
            low=config.cov_low,
            high=config.cov_high,
            seed=_one_number(seed),
        )
    return make_tensordict(tokens={"selected": unpad_tokens(selected_BL, lengths_B)}, lengths=lengths_B)


def correct_rollouts(batch: Batch, config: CorrectionConfig) -> Batch:
    """The batch with `loss_weights`, which multiply the policy's loss, and `loss_mask`, the tokens that it is over."""
    reads = ("old_logprobs", "rollout_logprobs", "response_mask")
    return batch.apply(correction_columns, reads, ("loss_weights", "loss_mask"), config=config)


def correction_columns(table: TensorDict, config: CorrectionConfig) -> TensorDict:
    """The configured correction of a whole batch: a weight per token, or a smaller mask, and the other as it was."""
    lengths_B = lengths(table)
    padded = {name: pad_tokens(column_T, lengths_B) for name, column_T in table["tokens"].items()}
    mask_BL = padded["response_mask"]
    result = rollout_corrections.load(config.kind)(
        logprobs=padded["old_logprobs"], rollout_logprobs=padded["rollout_logprobs"], mask=mask_BL, **_options(config)
    )
    found_BL = weights_or_mask(result, mask_BL, f"algorithm.correction.kind {config.kind}")
    if found_BL.dtype == torch.bool:
        weights_BL, kept_BL = found_BL.float(), found_BL & mask_BL
    else:
        weights_BL, kept_BL = found_BL, mask_BL
    if config.normalize and config.level and bool(mask_BL.any()):
        mean = weight_sums(weights_BL, mask_BL, level=config.level).mean()
        weights_BL = normalized_weights(weights_BL, mask_BL, mean=mean)
    columns = {"loss_weights": weights_BL.float(), "loss_mask": kept_BL}
    return make_tensordict(tokens={n: unpad_tokens(c, lengths_B) for n, c in columns.items()}, lengths=lengths_B)


def correction_metrics(tokens: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """What a correction did to a batch, and how far rollout and trainer are apart; docs/metrics.md.

    Reads `loss_weights` and `loss_mask` of a correction, `behavior_logprobs` of a loss that weighs by them, or both.
    """
    mask_BL, weights_BL = tokens["response_mask"], _weights(tokens)
    dropped = float((mask_BL & ~tokens.get("loss_mask", mask_BL)).sum())
    sums = weight_sums(weights_BL, mask_BL, level="token")
    samples = weight_sums(weights_BL, mask_BL, level=_sample_level(weights_BL, mask_BL))
    found: dict[str, Metric] = {
        "correction/weight": Mean(sums.total, sums.count),
        "correction/effective_samples": samples,
        "correction/rejected_fraction": Mean(dropped, sums.count),
    }
    mismatch = mismatch_metrics(tokens["old_logprobs"], tokens["rollout_logprobs"], mask_BL)
    return found | {f"mismatch/{name}": metric for name, metric in mismatch.items()}


def _weights(tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[B, L]: those of the correction, times those in the formula of the loss."""
    corrected_BL, behavior_BL = tokens.get("loss_weights"), tokens.get("behavior_logprobs")
    if behavior_BL is None:
        assert corrected_BL is not None, "metrics of a correction are of weights"
        return corrected_BL
    in_loss_BL = bounded_ratio(tokens["old_logprobs"] - behavior_BL)
    return in_loss_BL if corrected_BL is None else in_loss_BL * corrected_BL


def _sample_level(weights_BL: torch.Tensor, mask_BL: torch.Tensor) -> RatioLevel:
    """Whether tokens or rows were weighed: tokens of one row that share a weight are one sample and not many."""
    last_B1 = weights_BL.masked_fill(~last_masked(mask_BL), 0).sum(-1, keepdim=True)
    return "token" if bool((mask_BL & (weights_BL != last_B1)).any()) else "sequence"


def _options(config: CorrectionConfig) -> dict[str, Any]:  # Any: as the settings are
    """The keyword arguments of the correction's function."""
    if config.kind == "rejection":
        bounds = {} if config.low is None else {"low": config.low}
        return {"kind": config.kl_kind, "level": config.rejection_level, "high": config.high} | bounds
    if config.options is not None:
        return dict(config.options)
    return {"level": config.level, "max_weight": config.max_weight, "min_weight": config.min_weight}


def _one_number(seed: Sequence[int]) -> int:
    """A seed in 63 bits, without the collisions that a sum of its parts would have."""
    return int.from_bytes(hashlib.sha256(repr(tuple(seed)).encode()).digest()[:8]) >> 1
