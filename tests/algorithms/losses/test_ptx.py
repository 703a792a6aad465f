"""Tests both PTX forms with literals."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import PtxForm, ptx_loss, ptx_weights


def losses() -> tuple[Tensor, Tensor]:
    """Returns a policy loss and a language-modeling loss, both requiring gradient."""
    policy, text = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (-0.5, 3.0))
    return policy, text


def test_by_hand():
    assert_close(ptx_loss(*losses(), coef=0.2, form="add").item(), 0.1)
    assert_close(ptx_loss(*losses(), coef=0.2, form="mix").item(), 0.2)


def test_add_with_coef_zero_and_mix_with_coef_one_are_a_single_loss():
    assert ptx_loss(*losses(), coef=0.0, form="add").item() == -0.5
    assert ptx_loss(*losses(), coef=1.0, form="mix").item() == 3.0


@pytest.mark.parametrize("form", ["add", "mix"])
def test_the_gradient_equals_two_weighted_passes(form: PtxForm):
    policy, text = losses()
    assert torch.autograd.gradcheck(lambda p, t: ptx_loss(p, t, coef=0.3, form=form), (policy, text))
    actual = torch.autograd.grad(ptx_loss(policy, text, coef=0.3, form=form), (policy, text))
    assert_close(tuple(x.item() for x in actual), ptx_weights(coef=0.3, form=form))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ptx_weights(coef=-1.0, form="add"), r"coef .*-1\.0"),
        (lambda: ptx_weights(coef=27.8, form="mix"), r"coef .*27\.8"),
        (lambda: ptx_weights(coef=0.1, form="sum"), r"form .*'sum'"),  # pyright: ignore
        (lambda: ptx_loss(torch.zeros(2), torch.zeros(()), coef=0.1, form="add"), r"policy_loss .*\[2\]"),
    ],
)
def test_misuse_is_rejected(call: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        call()
