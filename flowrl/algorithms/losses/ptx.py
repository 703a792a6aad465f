"""Mixes a language-modeling loss on pretraining text into a policy loss (PPO-ptx)."""

from typing import Literal, get_args

from torch import Tensor

PtxForm = Literal["add", "mix"]


def ptx_loss(policy_loss: Tensor, lm_loss: Tensor, *, coef: float, form: PtxForm) -> Tensor:
    """Returns the weighted sum of a policy loss and a language-modeling loss.

        add   policy_loss + coef lm_loss
        mix   (1 - coef) policy_loss + coef lm_loss

    Args:
        policy_loss, lm_loss: scalars from `aggregate`, each with its own tokens and denominator.
        coef: weight of lm_loss. It is >= 0 for add, and in [0, 1] for mix. The 27.8 of the paper assumes other
            denominators.
        form: one of the two formulas above.
    Returns: a scalar, differentiable in both losses.
    Raises: ValueError for an unknown form, a coef out of range, or losses that are not scalars.

    add: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. (2). mix: ColossalChat.
    """
    for name, loss in (("policy_loss", policy_loss), ("lm_loss", lm_loss)):
        if loss.dim() != 0:
            raise ValueError(f"{name} has shape {list(loss.shape)}, but must be a scalar: pass it through `aggregate`")
    policy_weight, lm_weight = ptx_weights(coef=coef, form=form)
    return policy_weight * policy_loss + lm_weight * lm_loss


def ptx_weights(*, coef: float, form: PtxForm) -> tuple[float, float]:
    """Returns (weight of the policy loss, weight of the language-modeling loss) of `ptx_loss`, for separate backward
    passes.

    Raises ValueError for an unknown form or a coef out of range.
    """
    if form not in get_args(PtxForm):
        raise ValueError(f"form is {form!r}, but must be one of {', '.join(get_args(PtxForm))}")
    if not coef >= 0:
        raise ValueError(f"coef is {coef}, but must be 0 or more")
    if form == "mix" and coef > 1:
        raise ValueError(f"coef is {coef}, but must be in [0, 1] for form mix: use form add for a larger weight")
    return (1.0, coef) if form == "add" else (1.0 - coef, coef)
