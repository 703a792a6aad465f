"""Losses on pairs of a chosen and a rejected response: reward models, DPO, SimPO, ORPO and CPO.

Shape suffixes: P pairs, B rows, T token positions.

All losses take scores or log-probabilities [P] of responses (see `sequence_logprobs`) and return (loss [P], metrics [P]
without gradient). The loss of a step is the mean over its pairs. All losses raise ValueError for settings out of range
or mismatched shapes. Metrics of all losses:

    accuracy                          1 where the chosen reward is above the rejected reward
    chosen_reward, rejected_reward    implicit rewards, defined by each loss
    margin                            difference of the rewards
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowrl.algorithms.masking import at_least_float32, masked_tokens
from flowrl.algorithms.registry import (
    LabelSmoothing,
    NonNegativeFloat,
    PositiveFloat,
    preference_losses,
    reward_model_losses,
)

SequenceMode = Literal["sum", "mean"]
DpoKind = Literal["sigmoid", "hinge", "ipo"]

MAX_MEAN_LOGPROB = -1e-6
"""Upper bound of log P in ORPO's odds P / (1 - P), so that the odds and their gradient stay finite."""


def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, mode: SequenceMode) -> Tensor:
    """Returns the log-probability of each response, as a sum or mean over its tokens.

    Args:
        logprobs: [B, T], log-probabilities of the tokens.
        mask: bool [B, T], true for response tokens.
        mode: sum for DPO and KTO, mean for SimPO and ORPO.
    Returns: [B] in at least float32, differentiable. Rows without response tokens give 0.
    Raises: ValueError for an unknown mode, mismatched shapes or a mask that is not bool.
    """
    if mode not in get_args(SequenceMode):
        raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(get_args(SequenceMode))}")
    (logprobs_BT,) = masked_tokens(mask, logprobs=logprobs)
    sum_B = logprobs_BT.sum(-1)
    return sum_B if mode == "sum" else sum_B / mask.sum(-1).clamp(min=1)


@reward_model_losses.register("log_sig")
@reward_model_losses.register("log_exp")
def pairwise_reward_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, margins: Tensor | None = None, *, margin: NonNegativeFloat = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the pairwise loss of a reward model, optionally with a margin.

        L = -log sigmoid(chosen - rejected - margin) = log(1 + exp(rejected - chosen + margin))

    Both forms are equal. The names `log_sig` and `log_exp` select this function.

    Args:
        chosen_scores, rejected_scores: [P], scores of the reward model; the metrics report them as rewards.
        margins: [P], >= 0, a margin per pair, which replaces `margin`. Use larger margins for clearer preferences.
            Receives no gradient.
        margin: Difference by which the chosen score should exceed the rejected score. The column `margin` of the data
            replaces it.

    log_sig: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. (1). log_exp: Askell et al. 2021,
    https://arxiv.org/abs/2112.00861. Margin: Touvron et al. 2023, https://arxiv.org/abs/2307.09288, eq. (2). Deviation:
    eq. (1) of Ouyang et al. averages over the pairs of one prompt; here all pairs have the same weight.
    """
    if margins is not None:
        margin_P = _pairs(chosen_scores=chosen_scores, margins=margins)[1].detach()
    elif not margin >= 0:
        raise ValueError(f"margin is {margin}, but must be 0 or more")
    else:
        margin_P = margin
    chosen_P, rejected_P = _pairs(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    return -logsigmoid(chosen_P - rejected_P - margin_P), _pair_metrics(chosen_P, rejected_P)


@preference_losses.register("dpo", bind={"kind": "sigmoid"})
@preference_losses.register("dpo_hinge", bind={"kind": "hinge", "label_smoothing": 0.0})
@preference_losses.register("ipo", bind={"kind": "ipo", "label_smoothing": 0.0})
def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: PositiveFloat = 0.1,
    kind: DpoKind = "sigmoid",
    label_smoothing: LabelSmoothing = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of direct preference optimization (DPO), or a variant with a different link: hinge or IPO.

    With h = (chosen - ref_chosen) - (rejected - ref_rejected) and s = label_smoothing:

        sigmoid  -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)
        hinge    max(0, 1 - beta h)
        ipo      (h - 1 / (2 beta))^2

    Args:
        chosen_logprobs, rejected_logprobs: [P], sums over the response tokens under the policy. ipo also accepts means.
        ref_chosen_logprobs, ref_rejected_logprobs: [P], the same under the reference. They receive no gradient.
        beta: Strength of the KL regularization to the reference.
        kind: one of the three formulas above.
        label_smoothing: Probability that a label is flipped.
    Returns: a tuple (loss [P], metrics). The implicit reward is beta (logprob - ref_logprob).

    Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. (7). label_smoothing is conservative DPO: Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf. hinge: Zhao et al. 2023, https://arxiv.org/abs/2305.10425, with DPO's reward as in
    the hinge-norm loss of Liu et al. 2023, https://arxiv.org/abs/2309.06657. ipo: Azar et al. 2023,
    https://arxiv.org/abs/2310.12036, eq. (17), which calls beta tau. Only sigmoid has label_smoothing.
    """
    _check_dpo(beta, kind, label_smoothing)
    chosen_P, rejected_P, ref_chosen_P, ref_rejected_P = _pairs(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs.detach(),
        ref_rejected_logprobs=ref_rejected_logprobs.detach(),
    )
    chosen_ratio_P, rejected_ratio_P = chosen_P - ref_chosen_P, rejected_P - ref_rejected_P
    difference_P = chosen_ratio_P - rejected_ratio_P
    if kind == "sigmoid":
        loss_P = -(1 - label_smoothing) * logsigmoid(beta * difference_P)
        loss_P = loss_P - label_smoothing * logsigmoid(-beta * difference_P)
    elif kind == "hinge":
        loss_P = torch.relu(1 - beta * difference_P)
    else:
        loss_P = (difference_P - 1 / (2 * beta)).square()
    return loss_P, _pair_metrics(beta * chosen_ratio_P, beta * rejected_ratio_P)


@preference_losses.register("simpo")
def simpo_loss(
    chosen_mean_logprobs: Tensor,
    rejected_mean_logprobs: Tensor,
    *,
    beta: PositiveFloat = 2.0,
    margin: NonNegativeFloat = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the SimPO loss, which compares mean log-probabilities with a target margin and needs no reference.

        L = -log sigmoid(beta chosen - beta rejected - margin)

    Args:
        chosen_mean_logprobs, rejected_mean_logprobs: [P], means over the tokens of each response.
        beta: Scale of the reward.
        margin: Difference by which the chosen reward should exceed the rejected reward.
    Returns: a tuple (loss [P], metrics). The implicit reward is beta logprob.

    Meng et al. 2024, https://arxiv.org/abs/2405.14734, eq. (6), with beta from 2 to 10. The paper calls the
    margin gamma. The margin does not affect the metric accuracy.
    """
    _check_beta(beta)
    if not margin >= 0:
        raise ValueError(f"margin is {margin}, but must be 0 or more")
    chosen_P, rejected_P = _pairs(
        chosen_mean_logprobs=chosen_mean_logprobs, rejected_mean_logprobs=rejected_mean_logprobs
    )
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    return -logsigmoid(chosen_P - rejected_P - margin), _pair_metrics(chosen_P, rejected_P)


@preference_losses.register("orpo")
def orpo_loss(
    chosen_mean_logprobs: Tensor, rejected_mean_logprobs: Tensor, *, coef: NonNegativeFloat = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the ORPO loss: a supervised loss on the chosen response plus an odds-ratio term. It needs no reference.

        L = -log P(chosen) - coef log sigmoid(log odds(chosen) - log odds(rejected))    odds(y) = P(y) / (1 - P(y))

    Args:
        chosen_mean_logprobs, rejected_mean_logprobs: [P], log P: means over the tokens of each response, at most 0.
        coef: Weight of the odds-ratio term.
    Returns: a tuple (loss [P], metrics). The implicit reward is the log odds. Additional metrics:
        sft_loss: -log P(chosen).
        odds_ratio_loss: the odds-ratio term without coef.

    Hong et al. 2024, https://arxiv.org/abs/2403.07691, eq. (3) to (7), which call coef lambda. Deviations: the
    supervised term excludes the prompt, unlike in the authors' code. All pairs have the same weight. In the odds, log P
    is clamped to at most -1e-6, without gradient above this bound. Other implementations report coef log P as the
    reward, which has the same order.
    """
    if not coef >= 0:
        raise ValueError(f"coef is {coef}, but must be 0 or more")
    chosen_P, rejected_P = _pairs(
        chosen_mean_logprobs=chosen_mean_logprobs, rejected_mean_logprobs=rejected_mean_logprobs
    )
    chosen_odds_P, rejected_odds_P = _log_odds(chosen_P), _log_odds(rejected_P)
    odds_ratio_loss_P = -logsigmoid(chosen_odds_P - rejected_odds_P)
    details = {"sft_loss": -chosen_P.detach(), "odds_ratio_loss": odds_ratio_loss_P.detach()}
    return coef * odds_ratio_loss_P - chosen_P, _pair_metrics(chosen_odds_P, rejected_odds_P) | details


@preference_losses.register("cpo")
def cpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_lengths: Tensor,
    *,
    beta: PositiveFloat = 0.1,
    sft_coef: NonNegativeFloat = 1.0,
    label_smoothing: LabelSmoothing = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the CPO loss: DPO with a uniform reference, plus a supervised loss on the chosen response.

    With h = chosen - rejected and s = label_smoothing:

        L = -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h) - sft_coef chosen / chosen_lengths

    Args:
        chosen_logprobs, rejected_logprobs: [P], sums over the tokens of each response.
        chosen_lengths: [P], number of tokens of each chosen response. 0 gives no supervised loss.
        beta: Scale of the reward.
        sft_coef: Weight of the cross-entropy of the chosen response, a mean over its tokens.
        label_smoothing: Probability that a label is flipped.
    Returns: a tuple (loss [P], metrics). The implicit reward is beta logprob. Additional metric:
        sft_loss: the supervised loss without sft_coef.

    Xu et al. 2024, https://arxiv.org/abs/2401.08417, eq. (5). Deviation: the supervised loss is a mean over the tokens
    of a response, and all pairs have the same weight. The paper sums over tokens. TRL averages over all tokens of a
    batch, so that the weight of a pair depends on the other pairs of its batch.
    """
    _check_dpo(beta, "sigmoid", label_smoothing)
    if not sft_coef >= 0:
        raise ValueError(f"sft_coef is {sft_coef}, but must be 0 or more")
    chosen_P, rejected_P, lengths_P = _pairs(
        chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs, chosen_lengths=chosen_lengths
    )
    difference_P = beta * (chosen_P - rejected_P)
    preference_P = -(1 - label_smoothing) * logsigmoid(difference_P) - label_smoothing * logsigmoid(-difference_P)
    sft_P = -chosen_P / lengths_P.clamp(min=1)
    metrics = _pair_metrics(beta * chosen_P, beta * rejected_P) | {"sft_loss": sft_P.detach()}
    return preference_P + sft_coef * sft_P, metrics


def _log_odds(logprobs_P: Tensor) -> Tensor:
    """Returns log(P / (1 - P)) given log P."""
    clamped_P = logprobs_P.clamp(max=MAX_MEAN_LOGPROB)
    # expm1 is accurate where P is near 1. Where P is small, its error is negligible compared to log P.
    return clamped_P - torch.log(-torch.expm1(clamped_P))


def _pairs(**pairs: Tensor) -> list[Tensor]:
    """Checks that the tensors have the same shape [P], and promotes them to at least float32."""
    shape = next(iter(pairs.values())).shape
    for name, values in pairs.items():
        if values.dim() != 1 or values.shape != shape:
            raise ValueError(f"{name} has shape {list(values.shape)}, but must be [P], as {next(iter(pairs))} is")
    return [at_least_float32(values) for values in pairs.values()]


def _pair_metrics(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
    return {
        "accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
        "chosen_reward": chosen_P,
        "rejected_reward": rejected_P,
        "margin": chosen_P - rejected_P,
    }


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta is {beta}, but must be above 0")


def _check_dpo(beta: float, kind: DpoKind, label_smoothing: float) -> None:
    _check_beta(beta)
    if kind not in get_args(DpoKind):
        raise ValueError(f"kind is {kind!r}, but must be one of {', '.join(get_args(DpoKind))}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}, but must be in [0, 0.5)")
    if label_smoothing and kind != "sigmoid":
        raise ValueError(f"label_smoothing is {label_smoothing}, but applies only to kind sigmoid, not {kind}")
