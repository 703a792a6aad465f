"""Losses on pairs of a chosen and a rejected response: reward models, DPO, SimPO and ORPO. One loss per pair.

Shape suffixes: P pairs, B rows, T token positions.

Every loss takes log-probabilities (or scores) of whole answers, [P], which `sequence_logprobs` makes from those of
tokens, and returns (loss [P], metrics): the metrics are [P] too, without gradient. A step's loss is the sum of the
losses over the number of pairs of the whole step, and so are the means of the metrics, however it was split.

Metrics of every loss, by its implicit reward:
    accuracy: 1 where the chosen reward is above the rejected one, strictly.
    chosen_reward, rejected_reward: as each loss says.
    margin: their difference.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowrl.algorithms.masks import at_least_float32, masked_tokens

SequenceMode = Literal["sum", "mean"]
DpoKind = Literal["sigmoid", "hinge", "ipo"]

MAX_MEAN_LOGPROB = -1e-6
"""Upper bound of log P in ORPO's odds P / (1 - P), so that the odds and their gradient stay finite."""


def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, mode: SequenceMode) -> Tensor:
    """Returns the log-probability of each response, as a sum or mean over its tokens.

    Arguments:
        logprobs: [B, T], of the tokens.
        mask: bool [B, T], true on the tokens of the answer.
        mode: sum for DPO and KTO, mean over the answer's tokens for SimPO and ORPO.
    Returns: [B] in at least float32, differentiable. A row without a true position gives 0.
    Raises: ValueError on an unknown mode, shapes that differ or a mask that is not bool.
    """
    if mode not in get_args(SequenceMode):
        raise ValueError(f"mode is {mode!r}, it must be one of {', '.join(get_args(SequenceMode))}")
    (logprobs_BT,) = masked_tokens(mask, logprobs=logprobs)
    sum_B = logprobs_BT.sum(-1)
    return sum_B if mode == "sum" else sum_B / mask.sum(-1).clamp(min=1)


def pairwise_reward_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, *, margin: Tensor | float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the pairwise loss of a reward model, optionally with a margin.

        L = -log sigmoid(chosen - rejected - margin) = log(1 + exp(rejected - chosen + margin))

    The two sides are the same function, known as `log_sig` and as `log_exp`; both names are this one, which is
    finite wherever its arguments are.

    Arguments:
        chosen_scores, rejected_scores: [P], of the better and the worse answer.
        margin: [P] or a number, >= 0, larger where the better answer is clearly better; no gradient flows into it.
    Returns: (loss [P], metrics); the rewards are the scores, and `margin` their difference.
    Raises: ValueError on shapes that differ, or a negative margin given as a number.

    log_sig: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. (1). log_exp: Askell et al. 2021,
    https://arxiv.org/abs/2112.00861. Margin: Touvron et al. 2023, https://arxiv.org/abs/2307.09288, eq. (2).
    Deviation: eq. (1) of the first averages over the pairs of one prompt; here every pair counts the same.
    """
    if isinstance(margin, Tensor):
        margin_P = _pairs(chosen_scores=chosen_scores, margin=margin)[1].detach()
    elif not margin >= 0:
        raise ValueError(f"margin is {margin}, it must be 0 or more")
    else:
        margin_P = margin
    chosen_P, rejected_P = _pairs(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    return -logsigmoid(chosen_P - rejected_P - margin_P), _pair_metrics(chosen_P, rejected_P)


log_sig_loss = pairwise_reward_loss
log_exp_loss = pairwise_reward_loss


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    kind: DpoKind = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the DPO loss, or its variants with a different link function: hinge and IPO.

    With h = (chosen - ref_chosen) - (rejected - ref_rejected) and s = label_smoothing:

        sigmoid  -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)
        hinge    max(0, 1 - beta h)
        ipo      (h - 1 / (2 beta))^2

    Arguments:
        chosen_logprobs, rejected_logprobs: [P], of whole answers under the policy; sums over their tokens. For ipo,
            means are in use too: they make its target independent of length.
        ref_chosen_logprobs, ref_rejected_logprobs: [P], under the reference. No gradient flows into them.
        beta: > 0, how strongly the policy is held to the reference (0.1 is usual); tau of the paper of ipo.
        kind: see above.
        label_smoothing: in [0, 0.5), the probability that a label is the wrong way round; for sigmoid alone.
    Returns: (loss [P], metrics); the reward is beta (logprob - ref_logprob).
    Raises: ValueError on an unknown kind, a beta that is not above 0, a label_smoothing outside its range or with
        another kind, shapes that differ.

    Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. (7). label_smoothing is conservative DPO: Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf. hinge: Zhao et al. 2023, https://arxiv.org/abs/2305.10425, with DPO's reward as
    in the hinge-norm loss of Liu et al. 2023, https://arxiv.org/abs/2309.06657. ipo: Azar et al. 2023,
    https://arxiv.org/abs/2310.12036, eq. (17).
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


def simpo_loss(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, *, beta: float, margin: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the SimPO loss: mean log-probabilities, a target margin, no reference.

        L = -log sigmoid(beta chosen - beta rejected - margin)

    Arguments:
        chosen_logprobs, rejected_logprobs: [P], means over the tokens of each answer.
        beta: > 0, scale of the reward (2 to 10 are usual).
        margin: >= 0, by how much the chosen reward is to exceed the other; gamma of the paper.
    Returns: (loss [P], metrics); the reward is beta logprob. The accuracy does not ask for the margin.
    Raises: ValueError on a beta that is not above 0, a negative margin, shapes that differ.

    Meng et al. 2024, https://arxiv.org/abs/2405.14734, eq. (6).
    """
    _check_beta(beta)
    if not margin >= 0:
        raise ValueError(f"margin is {margin}, it must be 0 or more")
    chosen_P, rejected_P = _pairs(chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs)
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    return -logsigmoid(chosen_P - rejected_P - margin), _pair_metrics(chosen_P, rejected_P)


def orpo_loss(chosen_logprobs: Tensor, rejected_logprobs: Tensor, *, coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the ORPO loss: supervised loss on the chosen response plus an odds-ratio term; no reference.

        L = -log P(chosen) - coef log sigmoid(log odds(chosen) - log odds(rejected));    odds(y) = P(y) / (1 - P(y))

    Arguments:
        chosen_logprobs, rejected_logprobs: [P], log P: means over the tokens of each answer, at most 0.
        coef: >= 0, weight of the preference; lambda of the paper (0.1 is usual).
    Returns: (loss [P], metrics). The reward is log odds. Further metrics:
        sft_loss: -log P(chosen), the first term.
        odds_ratio_loss: -log sigmoid(...), the second without its weight.
    Raises: ValueError on a negative coef or shapes that differ.

    Hong et al. 2024, https://arxiv.org/abs/2403.07691, eq. (3) to (7).
    Deviations: the fine-tuning term is the mean over the answer, not over the prompt too as in the authors' code, and
    pairs count the same whatever their length; in the odds log P is held at or below -1e-6, where they would be
    infinite, and has no gradient through them above it. Peers report coef log P as the reward; it has the same order.
    """
    if not coef >= 0:
        raise ValueError(f"coef is {coef}, it must be 0 or more")
    chosen_P, rejected_P = _pairs(chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs)
    chosen_odds_P, rejected_odds_P = _log_odds(chosen_P), _log_odds(rejected_P)
    odds_ratio_loss_P = -logsigmoid(chosen_odds_P - rejected_odds_P)
    details = {"sft_loss": -chosen_P.detach(), "odds_ratio_loss": odds_ratio_loss_P.detach()}
    return coef * odds_ratio_loss_P - chosen_P, _pair_metrics(chosen_odds_P, rejected_odds_P) | details


def _log_odds(logprobs_P: Tensor) -> Tensor:
    """Returns log(P / (1 - P)) given log P."""
    held_P = logprobs_P.clamp(max=MAX_MEAN_LOGPROB)
    # expm1 keeps the digits of 1 - P where P is near 1; where P is small, what is lost is nothing beside log P.
    return held_P - torch.log(-torch.expm1(held_P))


def _pairs(**pairs: Tensor) -> list[Tensor]:
    """Checks that the tensors have the same shape [P], and promotes them to at least float32."""
    shape = next(iter(pairs.values())).shape
    for name, values in pairs.items():
        if values.dim() != 1 or values.shape != shape:
            raise ValueError(f"{name} has shape {list(values.shape)}, it must be [P], as {next(iter(pairs))} is")
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
        raise ValueError(f"beta is {beta}, it must be above 0")


def _check_dpo(beta: float, kind: DpoKind, label_smoothing: float) -> None:
    _check_beta(beta)
    if kind not in get_args(DpoKind):
        raise ValueError(f"kind is {kind!r}, it must be one of {', '.join(get_args(DpoKind))}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}, it must be in [0, 0.5)")
    if label_smoothing and kind != "sigmoid":
        raise ValueError(f"label_smoothing is {label_smoothing}, but kind {kind} has none: use kind sigmoid")
