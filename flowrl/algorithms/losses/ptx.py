"""Mixes a language-modeling loss on pretraining text into a policy loss (PPO-ptx)."""

from typing import Literal, get_args

from torch import Tensor

PtxForm = Literal["add", "mix"]


def ptx_loss(policy_loss: Tensor, lm_loss: Tensor, *, coef: float, form: PtxForm) -> Tensor:
    """Returns the weighted sum of a policy loss and a language-modeling loss.

        add   policy_loss + coef lm_loss
        mix   (1 - coef) policy_loss + coef lm_loss

    Arguments:
        policy_loss: a scalar, from `aggregate`.
        lm_loss: a scalar, the negative log-likelihood of the pretraining text, from `aggregate` over its own tokens.
        coef: for add >= 0 (27.8 in the paper, whose losses are sums over other counts), for mix in [0, 1].
        form: see above.
    Returns: a scalar, differentiable in both.
    Raises: ValueError on an unknown form, a coef outside its range, losses that are not scalars.

    add: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. (2). mix is what ColossalChat does.
    """
    for name, loss in (("policy_loss", policy_loss), ("lm_loss", lm_loss)):
        if loss.dim() != 0:
            raise ValueError(f"{name} has shape {list(loss.shape)}, it must be a scalar: pass it through `aggregate`")
    policy_weight, lm_weight = ptx_weights(coef=coef, form=form)
    return policy_weight * policy_loss + lm_weight * lm_loss


def ptx_weights(*, coef: float, form: PtxForm) -> tuple[float, float]:
    """Returns the weights of the policy loss and the language-modeling loss, for separate backward passes.

    Arguments: those of `ptx_loss`.
    Raises: ValueError on an unknown form or a coef outside its range.
    """
    if form not in get_args(PtxForm):
        raise ValueError(f"form is {form!r}, it must be one of {', '.join(get_args(PtxForm))}")
    if not coef >= 0:
        raise ValueError(f"coef is {coef}, it must be 0 or more")
    if form == "mix" and coef > 1:
        raise ValueError(f"coef is {coef}, form mix needs one in [0, 1]: use form add for a larger weight")
    return (1.0, coef) if form == "add" else (1.0 - coef, coef)
