"""Losses that train a policy (the student) to agree with another policy (the teacher), per token.

Shape suffixes: B rows, T token positions, K candidate tokens.

Both losses return (loss [B, T], metrics [B, T] without gradient) in at least float32. They do not mask tokens. The
caller passes the mask to `aggregate`.
"""

import torch
from torch import Tensor

from flowrl.algorithms.masking import at_least_float32
from flowrl.algorithms.registry import PositiveFloat, distillation_losses

MIN_REST = 1e-6
"""Smallest total probability of the tokens outside of the candidates. A smaller rest is a rounding error of float32."""


@distillation_losses.register("sampled_reverse_kl")
def sampled_reverse_kl_loss(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    behavior_logprobs: Tensor | None = None,
    *,
    max_weight: PositiveFloat = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a loss whose gradient is that of KL(student || teacher) at each token, estimated from the sampled token.

        L_t = -(log p_T(y_t) - log p_S(y_t)) w_t exp(log p_S(y_t) - sg(log p_S(y_t)))      sg: without gradient
        w_t = min(p_S(y_t) / p_B(y_t), max_weight)                                         B: behavior policy

    The first two factors are also without gradient. In expectation over tokens of the behavior policy, the gradient of
    L_t is that of the KL at position t, up to the truncation of w_t. Effects on later positions are ignored (discount
    0).

    Args:
        logprobs: [B, T], log-probabilities of the sampled tokens under the student.
        teacher_logprobs: [B, T], the same under the teacher. Receives no gradient.
        behavior_logprobs: [B, T], the same under the policy that sampled them. Receives no gradient. None is the
            student, so that all weights are 1.
        max_weight: Largest importance weight of a token: its probability under the student divided by that at sampling
            time.
    Returns: metrics reverse_kl: log p_S - log p_T, for tokens of the student an unbiased estimate of the KL, kl_k3,
        another estimate, which is never negative, and with behavior_logprobs also weight.
    Raises: ValueError for mismatched shapes.

    Lu et al. 2025 (Thinking Machines), "On-Policy Distillation"; Gu et al. 2023 (MiniLLM),
    https://arxiv.org/abs/2306.08543, eq. (2), single-step part. Truncated weights: Ionides 2008.
    """
    if logprobs.shape != teacher_logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(teacher_logprobs.shape)}"
        raise ValueError(f"logprobs and teacher_logprobs have shapes {shapes}, both must be [B, T]")
    student_BT = at_least_float32(logprobs)
    gap_BT = at_least_float32(teacher_logprobs.detach()) - student_BT.detach()
    loss_BT = -gap_BT * torch.exp(student_BT - student_BT.detach())
    metrics = {"reverse_kl": -gap_BT, "kl_k3": torch.expm1(gap_BT) - gap_BT}
    if behavior_logprobs is None:
        return loss_BT, metrics
    if behavior_logprobs.shape != logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(behavior_logprobs.shape)}"
        raise ValueError(f"logprobs and behavior_logprobs have shapes {shapes}, both must be [B, T]")
    weight_BT = torch.exp(student_BT.detach() - at_least_float32(behavior_logprobs.detach())).clamp(max=max_weight)
    return loss_BT * weight_BT, metrics | {"weight": weight_BT}


@distillation_losses.register("topk_forward_kl")
def topk_forward_kl_loss(topk_logprobs: Tensor, teacher_topk_logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the KL(teacher || student) at each token, over K + 1 classes: the teacher's K most likely tokens, and all
    other tokens together.

        L_t = sum over v of p_T(v) (log p_T(v) - log p_S(v)) + r_T (log r_T - log r_S)      r = 1 - sum over v of p(v)

    The loss is never negative. It is 0 if student and teacher agree on all classes. It is a lower bound of the KL over
    the vocabulary, and equals this KL if K is the size of the vocabulary.

    Args:
        topk_logprobs: [B, T, K], log-probabilities of the candidates under the student.
        teacher_topk_logprobs: [B, T, K], the same under the teacher. Receives no gradient.
    Returns: metrics forward_kl: the loss, and teacher_mass: the teacher's probability of the K candidates.
    Raises: ValueError for mismatched shapes.

    Hinton et al. 2015, https://arxiv.org/abs/1503.02531; on tokens of the student: Agarwal et al. 2024,
    https://arxiv.org/abs/2306.13649. The class of the other tokens: Hübotter et al. 2026 (SDPO), published code of
    https://arxiv.org/abs/2601.20802. Without this class, the student with the smallest loss has no probability outside
    of the candidates. Deviation: r is at least `MIN_REST`.
    """
    if topk_logprobs.shape != teacher_topk_logprobs.shape:
        shapes = f"{list(topk_logprobs.shape)} and {list(teacher_topk_logprobs.shape)}"
        raise ValueError(f"topk_logprobs and teacher_topk_logprobs have shapes {shapes}, both must be [B, T, K]")
    student_BTK, teacher_BTK = at_least_float32(topk_logprobs), at_least_float32(teacher_topk_logprobs.detach())
    mass_BT, teacher_mass_BT = student_BTK.exp().sum(-1), teacher_BTK.exp().sum(-1)
    rest_BT, teacher_rest_BT = (1 - mass_BT).clamp(min=MIN_REST), (1 - teacher_mass_BT).clamp(min=MIN_REST)
    loss_BT = (teacher_BTK.exp() * (teacher_BTK - student_BTK)).sum(-1)
    loss_BT = loss_BT + teacher_rest_BT * (teacher_rest_BT.log() - rest_BT.log())
    return loss_BT, {"forward_kl": loss_BT.detach(), "teacher_mass": teacher_mass_BT}
