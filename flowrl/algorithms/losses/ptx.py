"""Weights of a policy loss and a language-modeling loss on text (PPO-ptx)."""

from typing import Literal, get_args

PtxForm = Literal["add", "mix"]


def ptx_weights(*, coef: float, form: PtxForm) -> tuple[float, float]:
    """Returns (weight of the policy loss, weight of the language-modeling loss).

        add   policy_loss + coef lm_loss
        mix   (1 - coef) policy_loss + coef lm_loss

    Each loss has its own tokens and denominator. The coefficient 27.8 of the paper assumes different denominators.

    Args:
        coef: weight of lm_loss. It is >= 0 for add, and in [0, 1] for mix.
        form: one of the two formulas above.
    Raises: ValueError for an unknown form or a coef out of range.

    add: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. (2). mix: ColossalChat.
    """
    if form not in get_args(PtxForm):
        raise ValueError(f"form is {form!r}, but must be one of {', '.join(get_args(PtxForm))}")
    if not coef >= 0:
        raise ValueError(f"coef is {coef}, but must be 0 or more")
    if form == "mix" and coef > 1:
        raise ValueError(f"coef is {coef}, but must be in [0, 1] for form mix: use form add for a larger weight")
    return (1.0, coef) if form == "add" else (1.0 - coef, coef)
