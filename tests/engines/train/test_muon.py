"""Muon against the closed form of its orthogonalization, and torch's Muon. parallel/test_strategies.py tests ranks."""

import pytest
import torch
from torch import Tensor, nn

from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS
from flowrl.engines.train.muon import NUM_ITERATIONS, Muon, orthogonalize
from tests.engines.closeness import assert_norm_close


def random_matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def muon_of(weight: nn.Parameter, other: nn.Parameter | None = None, *, decay: float = 0.0) -> Muon:
    groups = [{"params": [weight], "weight_decay": decay, "momentum": 0.95}]
    if other is not None:
        groups.append({"params": [other], "weight_decay": decay, "momentum": None})
    return Muon(groups, SINGLE_PROCESS, lr=0.1, betas=(0.9, 0.999), eps=1e-8)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4)])
def test_an_iteration_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = random_matrix(*shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(NUM_ITERATIONS):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert values.min() > 0.6 and values.max() < 1.25
    assert_norm_close(orthogonalize(matrix), left @ values.diag() @ right)


def test_a_zero_matrix_stays_zero() -> None:
    assert orthogonalize(torch.zeros(3, 4)).count_nonzero() == 0


def test_an_update_does_not_depend_on_the_scale_of_the_gradient() -> None:
    weights = [nn.Parameter(random_matrix(4, 6)) for _ in range(2)]
    for weight, scale in zip(weights, (1.0, 1e3), strict=True):
        weight.grad = random_matrix(4, 6, seed=1) * scale
        muon_of(weight).step()
    assert_norm_close(weights[1].detach(), weights[0].detach())


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_two_steps_equal_those_of_torch_up_to_its_rounding_to_bfloat16(shape: tuple[int, int]) -> None:
    own, other = (nn.Parameter(random_matrix(*shape).float()) for _ in range(2))
    optimizers = (
        muon_of(own, decay=0.5),
        torch.optim.Muon([other], lr=0.1, weight_decay=0.5, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(2):
        for weight, optimizer in zip((own, other), optimizers, strict=True):
            weight.grad = random_matrix(*shape, seed=step + 1).float()
            optimizer.step()
    start = random_matrix(*shape).float()
    # The iterations amplify a rounding error of 2^-9 by up to 3.4 each.
    assert_norm_close(own.detach() - start, other.detach() - start, rtol=0.05)


def test_other_weights_take_the_step_of_adamw() -> None:
    matrix, own, other = (nn.Parameter(random_matrix(3, 5)) for _ in range(3))
    optimizers = muon_of(matrix, own, decay=0.5), torch.optim.AdamW([other], lr=0.1, weight_decay=0.5, eps=1e-8)
    for step in range(2):
        for weight in (matrix, own, other):
            weight.grad = random_matrix(3, 5, seed=step + 1)
        for optimizer in optimizers:
            optimizer.step()
    assert_norm_close(own.detach(), other.detach())
    assert set(optimizers[0].state[matrix]) == {"step", "momentum_buffer"}
    assert not torch.allclose(matrix.detach(), own.detach())
