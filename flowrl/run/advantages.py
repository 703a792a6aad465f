"""Computes advantages, loss columns and batch metrics on the task worker, with the functions of flowrl/algorithms.

Shape suffixes: B is the number of rows, T is the length of the longest row.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from flowrl.algorithms import (
    FixedKlControl,
    KlControl,
    RatioLevel,
    RewardMoments,
    explained_variance,
    kl_estimate,
    kl_shaped_rewards,
    last_masked,
    masked_mean,
    mismatch_metrics,
    update_moments,
    weight_sums,
)
from flowrl.algorithms.losses.policy_losses import bounded_ratio
from flowrl.algorithms.registry import (
    Registry,
    advantage_estimators,
    call,
    described,
    kl_controls,
    kl_kinds,
    policy_losses,
    reward_shaping,
    rollout_corrections,
    weights_or_mask,
)
from flowrl.algorithms.repetition import repeated_ngrams
from flowrl.config import (
    ActorConfig,
    AdvantageConfig,
    AnyAdvantage,
    CorrectionConfig,
    KlControlConfig,
    ShapingConfig,
    UserError,
)
from flowrl.config.algorithm.setting_types import ColumnNames
from flowrl.controller.dispatch import Future
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.fields import FIELDS
from flowrl.data.batch.tensordicts import environment_lengths, lengths, make_tensordict, pad_tokens, unpad_tokens
from flowrl.data.metric import Max, Mean, Metric, Min, Sum
from flowrl.workers.dialogs import TURN_REWARDS

COLUMN_OF = {
    "mask": "response_mask",
    "trained_mask": "loss_mask",
    "rewards": "scores",
    "groups": "group",
    "logprobs": "old_logprobs",
    "importance_weights": "loss_weights",
    "lengths": "response_mask",
}
"""Column of an input of an estimator or a shaping, or from which the input is computed, if their names differ."""

OWN_INPUTS = ("mask", "trained_mask", "seed", "columns", "moments", "advantages")
"""Inputs that this module computes for all batches. `columns` are all columns, by name."""

METRIC_COLUMNS = (
    "input_ids",
    "group",
    "scores",
    "response_mask",
    "truncated",
    "reward_truncated",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "returns",
    "loss_weights",
    "loss_mask",
    "behavior_logprobs",
    "shaped_scores",
)

Moments = tuple[RewardMoments, ...]
"""Reward moments, one per entry of `algorithm.shaping`."""


@dataclass(frozen=True)
class ShapedScores:
    """Result of reward shaping on one batch."""

    scores_B: torch.Tensor
    moments: Moments
    """Moments of all rewards so far, including this batch."""


class AlgorithmSettings(Protocol):
    """Part of a run's config that determines the advantages."""

    @property
    def algorithm(self) -> AnyAdvantage: ...

    @property
    def actor(self) -> ActorConfig: ...


class Advantages:
    """Computes all columns that an actor or critic update needs, except log-probabilities and values.

    Owns the state that steps share: the coefficient of the KL penalty and the reward moments. The task worker (a
    process that runs functions on batches) updates this state. The driver passes futures of the state from step to
    step, so `compute` does not block. Pass the object to `run.add_checkpointable`.
    """

    def __init__(self, config: AlgorithmSettings) -> None:
        """Raises UserError if `algorithm.kl_control` names a class without the interface of `KlControl`."""
        self._config, self._actor = config.algorithm, config.actor
        self._kl_control: KlControl | Future | LocalRef = _new_kl_control(self._config)
        self._shaped: ShapedScores | Future | LocalRef = ShapedScores(
            torch.empty(0), (RewardMoments(),) * len(self._config.shaping)
        )

    def compute(self, batch: Batch) -> tuple[Batch, Future | LocalRef]:
        """Returns the batch with new columns, and a future of the metrics for `run.log`. Does not block.

        Always adds `token_rewards` and `advantages`. A critic adds `returns`, `algorithm.shaping` adds `shaped_scores`,
        and `algorithm.correction` adds `loss_weights` and `loss_mask`. `algorithm.mask_truncated` adds `loss_mask`.
        Some losses add `behavior_logprobs` or columns that they declare, such as `selected`. With `actor.old_logprobs:
        rollout`, `old_logprobs` is `rollout_logprobs`, unless the batch has it. Raises UserError if the batch lacks a
        column.

        Args:
            batch: columns `scores`, `response_mask`, and the inputs of the estimator, the loss and the KL penalty. Its
                seed is an input of functions that prepare columns of a loss.
        """
        config, actor, kl_control, shaped = self._config, self._actor, self._kl_control, None
        loss_inputs = policy_losses.inputs(policy_losses.load(actor.loss.kind))
        copies = ["behavior_logprobs"] if "behavior_logprobs" in loss_inputs else []
        if actor.old_logprobs == "rollout" and "old_logprobs" not in batch and "rollout_logprobs" in batch:
            copies.append("old_logprobs")
        for name in copies:
            batch = batch.union(batch.select("rollout_logprobs").rename({"rollout_logprobs": name}))
        if config.shaping:
            reads = _select(batch, _shaping_columns(config.shaping), "algorithm.shaping")
            shaped = batch.reduce(shape_scores, reads, shaping=config.shaping, previous=self._shaped)
            self._shaped = shaped
        if _is_adaptive(config):
            reads = _select(batch, ["old_logprobs", "ref_logprobs", "response_mask"], "algorithm.kl_control")
            self._kl_control = batch.reduce(update_kl_control, reads, config=config, control=kl_control)
        reads, writes = _columns(batch, config, actor)
        batch = batch.apply(
            compute_columns,
            reads,
            writes,
            config=config,
            actor=actor,
            kl_control=kl_control,
            shaped=shaped,
            seed=batch.seed,
        )
        return batch, measure_batch(batch, kl_control)

    def state(self) -> dict[str, Any]:
        """Returns the state as plain numbers for a checkpoint. Blocks until the last `compute` is done."""
        control, shaped = _value(self._kl_control), _value(self._shaped)
        return {"kl_control": asdict(control), "moments": [asdict(moments) for moments in shaped.moments]}

    def restore(self, state: Mapping[str, Any]) -> None:
        control: Any = _new_kl_control(self._config)
        self._kl_control = replace(control, **state["kl_control"])
        self._shaped = ShapedScores(torch.empty(0), tuple(RewardMoments(**moments) for moments in state["moments"]))


def _value(result: Any) -> Any:  # Any: a value or a future
    return result.get() if isinstance(result, Future | LocalRef) else result


def _columns(batch: Batch, config: AdvantageConfig, actor: ActorConfig) -> tuple[list[str], list[str]]:
    """Returns the columns that `compute_columns` reads and writes. Raises UserError if the batch lacks one of them."""
    inputs = _inputs(advantage_estimators, config.estimator, config.arguments())
    # Only a correction adds `loss_weights`. Without it, all weights are 1.
    required = [name for name, is_required in inputs.items() if is_required and name != "loss_weights"]
    optional = [name for name in inputs if name not in required]
    if "scores" not in advantage_estimators.prepared(advantage_estimators.load(config.estimator)):
        required.append("scores")
    if config.shaping:  # shaped scores are an argument, not a column
        required = [name for name in required if name != "scores"]
    else:
        optional.append(TURN_REWARDS)
    if config.kl_penalty is not None:
        required += ["old_logprobs", "ref_logprobs"]
    writes = ["token_rewards", "advantages"]
    writes += ["returns"] if "values" in inputs else []
    writes += ["shaped_scores"] if config.shaping else []
    reads = _select(batch, ["response_mask", *required], f"algorithm.estimator {config.estimator}")
    if config.applied_correction is not None:
        reads += _select(batch, ["old_logprobs", "rollout_logprobs"], "algorithm.correction")
        writes += ["loss_weights", "loss_mask"]
    reads += [name for name in optional if name in batch and name not in writes]
    if config.mask_truncated:
        reads += _select(batch, ["truncated"], "algorithm.mask_truncated")
        writes.append("loss_mask")
    for name, prepare in policy_losses.prepared(policy_losses.load(actor.loss.kind)).items():
        columns = {n: needed for n, needed in policy_losses.inputs(prepare).items() if n not in (*OWN_INPUTS, *writes)}
        reads += _select(batch, [n for n in columns if columns[n] or n in batch], f"actor.loss {actor.loss.kind}")
        writes.append(name)
    return list(dict.fromkeys(reads)), list(dict.fromkeys(writes))


def _inputs(registry: Registry[Any], name: str, settings: Mapping[str, Any]) -> dict[str, bool]:
    """Returns column -> whether it is required, for a function and the functions that prepare its inputs."""
    function = registry.load(name)
    prepared = registry.prepared(function)
    inputs = {n: needed for each in (function, *prepared.values()) for n, needed in registry.inputs(each).items()}
    parameters = registry.parameters(function)
    own = (*OWN_INPUTS, *prepared, *parameters)
    named = [key for key, parameter in parameters.items() if parameter.annotation == ColumnNames]
    columns = {COLUMN_OF.get(n, n): needed for n, needed in inputs.items() if n not in own}
    return columns | {column: True for key in named for column in settings[key]}


def _select(batch: Batch, names: Sequence[str], setting: str) -> list[str]:
    """Returns the names without duplicates. Raises UserError, naming the setting, if the batch lacks a column."""
    for name in names:
        if name not in batch:
            definition = f" ({FIELDS[name].meaning})" if name in FIELDS else ""
            raise UserError(
                f"{setting} reads the column {name}{definition}, which the batch does not have: store it in the "
                f"recipe before Advantages.compute, or change the setting"
            )
    return list(dict.fromkeys(names))


def compute_columns(
    table: TensorDict,
    config: AdvantageConfig,
    actor: ActorConfig,
    kl_control: KlControl,
    shaped: ShapedScores | None,
    seed: Sequence[int],
) -> TensorDict:
    lengths_B = lengths(table)
    tokens = {name: pad_tokens(column_T, lengths_B) for name, column_T in table["tokens"].items()}
    rows = {name: column for name, column in table["rows"].items() if isinstance(column, torch.Tensor)}
    mask_BT = tokens["response_mask"]
    trained_BT = mask_BT & ~rows["truncated"][:, None] if config.mask_truncated else mask_BT
    result: dict[str, torch.Tensor] = {"loss_mask": trained_BT} if config.mask_truncated else {}
    if config.applied_correction is not None:
        result |= _correction_columns(tokens, trained_BT, config.applied_correction)
        trained_BT = result["loss_mask"]
    if shaped is not None:
        rows |= {"scores": shaped.scores_B}
    result |= _advantage_columns(tokens | rows | result, mask_BT, trained_BT, config, kl_control.coef)
    # A hash of 63 bits, because the sum of run seed and step would collide with other runs.
    number = int.from_bytes(hashlib.sha256(repr(tuple(seed)).encode()).digest()[:8]) >> 1
    available = tokens | rows | result | {"mask": trained_BT, "seed": number}
    for name, prepare in policy_losses.prepared(policy_losses.load(actor.loss.kind)).items():
        result[name] = call(prepare, available, actor.loss.arguments())
    return make_tensordict(
        {} if shaped is None else {"shaped_scores": shaped.scores_B},
        {name: unpad_tokens(column_BT, lengths_B) for name, column_BT in result.items()},
        lengths=lengths_B,
    )


# Rewards and advantages.


def shape_scores(table: TensorDict, shaping: Sequence[ShapingConfig], previous: ShapedScores) -> ShapedScores:
    """Applies the functions of `algorithm.shaping` in order to the scores of a full batch.

    The input `rewards` of a function is the result of the previous function. `scores` is the column `scores`, and
    `lengths` counts all response tokens, as `rollout.max_response_tokens` does: those of the policy and of an
    environment. `moments` are the moments of all rewards that this function has received.
    """
    scores_B = table["rows", "scores"]
    inputs = {"scores": scores_B, "groups": table["rows"].get("group", None)}
    if "tokens" in table.keys() and "response_mask" in table["tokens"].keys():  # noqa: SIM118 (a TensorDict)
        mask_T, lengths_B = table["tokens", "response_mask"], lengths(table)
        inputs["lengths"] = pad_tokens(mask_T, lengths_B).sum(-1) + environment_lengths(mask_T, lengths_B)
    rewards_B, updated = scores_B, []
    for entry, moments in zip(shaping, previous.moments, strict=True):
        function = reward_shaping.load(entry.kind)
        names = reward_shaping.inputs(function)
        updated.append(update_moments(moments, rewards_B) if "moments" in names else moments)
        inputs |= {"rewards": rewards_B, "moments": updated[-1]}
        rewards_B = call(function, inputs, entry.arguments())
        if not isinstance(rewards_B, torch.Tensor) or rewards_B.shape != scores_B.shape:
            raise UserError(
                f"algorithm.shaping {entry.kind} returned {described(rewards_B)}, it must return rewards of shape "
                f"{list(scores_B.shape)}"
            )
    return ShapedScores(rewards_B.float(), tuple(updated))


def _shaping_columns(shaping: Sequence[ShapingConfig]) -> list[str]:
    names = [name for entry in shaping for name in reward_shaping.inputs(reward_shaping.load(entry.kind))]
    return ["scores", *(COLUMN_OF.get(name, name) for name in names if name not in OWN_INPUTS)]


def _advantage_columns(
    columns: Mapping[str, torch.Tensor],
    mask_BT: torch.Tensor,
    trained_BT: torch.Tensor,
    config: AdvantageConfig,
    kl_coef: float,
) -> dict[str, torch.Tensor]:
    """Returns `token_rewards`, `advantages` and, with a critic, `returns`.

    An estimator may prepare the inputs `scores`, and `reward`, one number per row from which token rewards are
    computed.
    """
    estimator, settings = advantage_estimators.load(config.estimator), config.arguments()
    available: dict[str, Any] = settings | dict(columns)
    available |= {name: columns[column] for name, column in COLUMN_OF.items() if column in columns}
    available |= {"mask": mask_BT, "trained_mask": trained_BT, "columns": columns}
    for name, prepare in advantage_estimators.prepared(estimator).items():
        available[name] = call(prepare, available, settings)
    scores, scores_B = available["scores"], available.get("reward", available["scores"])
    if (penalty := config.kl_penalty) is not None:
        rewards_BT = kl_shaped_rewards(
            torch.zeros_like(scores_B) if TURN_REWARDS in columns else scores_B,
            columns["old_logprobs"],
            columns["ref_logprobs"],
            mask_BT,
            coef=kl_coef,
            kind=kl_kinds.load(penalty.kl_kind),
        )
        if TURN_REWARDS in columns:
            rewards_BT = rewards_BT + columns[TURN_REWARDS]
        scores = rewards_BT.sum(-1)
    elif TURN_REWARDS in columns:
        rewards_BT = columns[TURN_REWARDS]
    else:
        rewards_BT = torch.where(last_masked(mask_BT), scores_B[:, None], 0)
    result = call(estimator, available | {"scores": scores, "rewards": rewards_BT}, settings)
    estimates = _check_estimates(result, "values" in advantage_estimators.inputs(estimator), mask_BT, config.estimator)
    return {"token_rewards": rewards_BT} | estimates


def _check_estimates(
    result: object, has_critic: bool, mask_BT: torch.Tensor, estimator: str
) -> dict[str, torch.Tensor]:
    """Returns an estimator's result by name. Raises UserError if a user-defined estimator returns a wrong shape."""
    columns = list(result) if has_critic and isinstance(result, tuple) else [result]
    names = ("advantages", "returns") if has_critic else ("advantages",)
    tensors = [column for column in columns if isinstance(column, torch.Tensor) and column.shape == mask_BT.shape]
    if len(columns) != len(names) or len(tensors) != len(names):
        raise UserError(
            f"algorithm.estimator {estimator} returned {described(result)}, it must return "
            f"{' and '.join(names)}, {'each ' if has_critic else ''}of shape {list(mask_BT.shape)}"
        )
    return dict(zip(names, tensors, strict=True))


# Columns of corrections and losses.


def _correction_columns(
    tokens: Mapping[str, torch.Tensor], trained_BT: torch.Tensor, config: CorrectionConfig
) -> dict[str, torch.Tensor]:
    """Returns `loss_weights`, which multiply the policy loss, and `loss_mask`, which selects the tokens of the loss.

    A correction returns only weights or only a mask. The other column then has no effect. `trained_BT` are the tokens
    that other settings keep in the loss.
    """
    mask_BT = tokens["response_mask"]
    inputs = {"logprobs": tokens["old_logprobs"], "rollout_logprobs": tokens["rollout_logprobs"]}
    inputs |= {"mask": mask_BT, "trained_mask": trained_BT}
    result = call(rollout_corrections.load(config.kind), inputs, config.arguments())
    corrected_BT = weights_or_mask(result, mask_BT, f"algorithm.correction.kind {config.kind}")
    if corrected_BT.dtype == torch.bool:
        weights_BT, loss_mask_BT = corrected_BT.float(), corrected_BT & trained_BT
    else:
        weights_BT, loss_mask_BT = corrected_BT, trained_BT
    return {"loss_weights": weights_BT.float(), "loss_mask": loss_mask_BT}


# The coefficient of the KL penalty.


def _new_kl_control(config: AdvantageConfig) -> KlControl:
    """Returns the KL control of the first step. Raises UserError if a user-defined class lacks the interface."""
    if (penalty := config.kl_penalty) is None:
        return FixedKlControl(0.0)
    factory = kl_controls.load(penalty.kl_control.kind)
    return _check_kl_control(factory(coef=penalty.kl_coef, **penalty.kl_control.arguments()), penalty.kl_control)


def _check_kl_control(control: object, config: KlControlConfig) -> KlControl:
    for is_valid, problem in (
        (isinstance(control, KlControl), "without coef or update(kl, num_rows)"),
        (is_dataclass(control), "which is not a dataclass and cannot be saved in a checkpoint"),
    ):
        if not is_valid:
            raise UserError(
                f"algorithm.kl_control.kind {config.kind} returns a {type(control).__name__} {problem}: write a "
                f"dataclass of plain numbers, like AdaptiveKlControl in flowrl/algorithms/kl/kl_control.py"
            )
    assert isinstance(control, KlControl)
    return control


def _is_adaptive(config: AdvantageConfig) -> bool:
    return config.kl_penalty is not None and config.kl_penalty.kl_control.kind != "fixed"


def update_kl_control(table: TensorDict, config: AdvantageConfig, control: KlControl) -> KlControl:
    """Returns the KL control of the next step, given the mean KL to the reference over a batch's response tokens."""
    penalty = config.kl_penalty
    assert penalty is not None
    names = ("old_logprobs", "ref_logprobs", "response_mask")
    logprobs_BT, ref_logprobs_BT, mask_BT = (pad_tokens(table["tokens", name], lengths(table)) for name in names)
    kl_BT = kl_kinds.load(penalty.kl_kind)(logprobs=logprobs_BT, ref_logprobs=ref_logprobs_BT)
    mean_kl = float(masked_mean(kl_BT.to(torch.float64), mask_BT))
    return _check_kl_control(control.update(mean_kl, int(mask_BT.any(-1).sum())), penalty.kl_control)


# Metrics.


_NO_PENALTY = FixedKlControl(0.0)


def measure_batch(batch: Batch, kl_control: KlControl | Future | LocalRef = _NO_PENALTY) -> Future | LocalRef:
    """Returns a future of the metrics of a batch, with or without advantages. Does not block."""
    return batch.reduce(batch_metrics, [name for name in METRIC_COLUMNS if name in batch], kl_control=kl_control)


def batch_metrics(table: TensorDict, kl_control: KlControl) -> dict[str, Metric]:
    """Returns the metrics of a batch: reward, lengths, KL, rollout gap, critic and correction (docs/metrics.md)."""
    lengths_B, rows = lengths(table), dict(table["rows"].items())
    tokens = {name: pad_tokens(column_T, lengths_B) for name, column_T in table["tokens"].items()}
    mask_BT, num_rows = tokens["response_mask"], len(lengths_B)
    num_tokens = float(mask_BT.sum())
    metrics: dict[str, Metric] = {
        "response_length": Mean(num_tokens, num_rows),
        "response_tokens": Sum(num_tokens),
    }
    if num_environment_tokens := float(environment_lengths(table["tokens", "response_mask"], lengths_B).sum()):
        metrics["environment_length"] = Mean(num_environment_tokens, num_rows)
    if "scores" in rows:
        metrics |= {
            "reward": Mean(float(rows["scores"].sum()), num_rows),
            "reward_max": Max(float(rows["scores"].max())),
            "reward_min": Min(float(rows["scores"].min())),
        }
    if "shaped_scores" in rows and "scores" in rows:
        metrics["reward_shaping"] = Mean(float((rows["shaped_scores"] - rows["scores"]).sum()), num_rows)
    flags = [column for column in ("truncated", "reward_truncated") if column in rows]
    metrics |= {f"{column}_fraction": Mean(float(rows[column].sum()), num_rows) for column in flags}
    metrics |= _diversity_metrics(rows, tokens)
    if "old_logprobs" in tokens and "rollout_logprobs" in tokens:
        gap_BT = (tokens["old_logprobs"] - tokens["rollout_logprobs"]).abs()
        metrics["rollout_gap"] = Mean(float(masked_mean(gap_BT, mask_BT)) * num_tokens, num_tokens)
        metrics["rollout_gap_max"] = Max(float(gap_BT.masked_fill(~mask_BT, 0).max()))
    if "old_logprobs" in tokens and "ref_logprobs" in tokens:
        kl_BT = kl_estimate(tokens["old_logprobs"], tokens["ref_logprobs"], kind="k3")
        metrics["kl"] = Mean(float(masked_mean(kl_BT, mask_BT)) * num_tokens, num_tokens)
    if kl_control.coef:
        metrics["kl_coef"] = Mean(kl_control.coef, 1)
    if "values" in tokens and "returns" in tokens:
        metrics["explained_variance"] = Mean(float(explained_variance(tokens["values"], tokens["returns"], mask_BT)), 1)
    if "loss_weights" in tokens or "behavior_logprobs" in tokens:
        metrics |= _correction_metrics(tokens)
    return metrics


def _diversity_metrics(rows: Mapping[str, torch.Tensor], tokens: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """Returns the share of groups with equal scores and the share of repeated n-grams, if there are such groups and
    n-grams.
    """
    metrics: dict[str, Metric] = {}
    if "group" in rows and "scores" in rows:
        scores_B = rows.get("shaped_scores", rows["scores"])
        groups_G, group_of_B, sizes_G = rows["group"].unique(return_inverse=True, return_counts=True)
        low_G, high_G = (
            scores_B.new_zeros(len(groups_G)).scatter_reduce(0, group_of_B, scores_B, kind, include_self=False)
            for kind in ("amin", "amax")
        )
        if num_groups := int((sizes_G > 1).sum()):
            num_equal = int(((sizes_G > 1) & (low_G == high_G)).sum())
            metrics["equal_scores_fraction"] = Mean(num_equal, num_groups)
    if "input_ids" in tokens:
        num_repeated, num_ngrams = repeated_ngrams(tokens["input_ids"], tokens["response_mask"])
        metrics |= {"repetition": Mean(num_repeated, num_ngrams)} if num_ngrams else {}
    return metrics


def _correction_metrics(tokens: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """Returns the metrics of a correction, or of a loss that weights tokens by the rollout's probabilities."""
    mask_BT, weights_BT = tokens["response_mask"], tokens.get("loss_weights")
    trained_BT = tokens.get("loss_mask", mask_BT)
    if "behavior_logprobs" in tokens:
        in_loss_BT = bounded_ratio(tokens["old_logprobs"] - tokens["behavior_logprobs"])
        weights_BT = in_loss_BT if weights_BT is None else in_loss_BT * weights_BT
    assert weights_BT is not None
    metrics: dict[str, Metric] = {
        "correction/rejected_fraction": Mean(float((mask_BT & ~trained_BT).sum()), float(mask_BT.sum()))
    }
    if bool(trained_BT.any()):
        # Tokens of a row with the same weight count as one sample.
        last_B1 = weights_BT.masked_fill(~last_masked(trained_BT), 0).sum(-1, keepdim=True)
        level: RatioLevel = "token" if bool((trained_BT & (weights_BT != last_B1)).any()) else "sequence"
        sums = weight_sums(weights_BT, trained_BT, level="token")
        metrics["correction/weight"] = Mean(sums.total, sums.count)
        metrics["correction/effective_samples"] = weight_sums(weights_BT, trained_BT, level=level)
    mismatch = mismatch_metrics(tokens["old_logprobs"], tokens["rollout_logprobs"], mask_BT)
    return metrics | {f"mismatch/{name}": metric for name, metric in mismatch.items()}
