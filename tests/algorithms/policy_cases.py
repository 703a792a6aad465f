"""All policy losses with common columns, for tests of shared properties."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl import algorithms

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
Columns = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Policy loss with its settings and its additional columns."""

    function: LossFunction
    options: Mapping[str, float | str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    continuous: bool = True
    """Whether the loss is continuous in its inputs, without thresholds that exclude tokens."""

    def __call__(self, columns: Columns) -> tuple[Tensor, dict[str, Tensor]]:
        four = (columns[name] for name in ("logprobs", "old_logprobs", "advantages", "mask"))
        return self.function(*four, **{name: columns[name] for name in self.columns}, **self.options)


CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
CASES: dict[str, Case] = {
    "ppo": Case(algorithms.clipped_policy_loss, CLIPS),
    "ppo_dual_clip": Case(algorithms.clipped_policy_loss, {**CLIPS, "dual_clip": 3.0}),
    "decoupled_ppo": Case(algorithms.decoupled_policy_loss, CLIPS, ("behavior_logprobs",)),
    "decoupled_ppo_capped": Case(
        algorithms.decoupled_policy_loss, {**CLIPS, "max_weight": 2.0}, ("behavior_logprobs",), continuous=False
    ),
    "sapo": Case(algorithms.sapo_loss),
    "gspo": Case(algorithms.gspo_loss, CLIPS),
    "gspo_token": Case(algorithms.gspo_token_loss, CLIPS),
    "gmpo": Case(algorithms.gmpo_loss, {"clip_low": 0.4, "clip_high": 0.4}),
    "reinforce": Case(algorithms.reinforce_loss),
    "gpg": Case(algorithms.gpg_loss),
    "cispo": Case(algorithms.cispo_loss, {"clip_low": 0.3, "clip_high": 0.4}),
    "dppo_tv": Case(algorithms.dppo_loss, {"divergence": "tv", "delta_low": 0.1, "delta_high": 0.15}, continuous=False),
    "dppo_kl": Case(
        algorithms.dppo_loss,
        {"divergence": "kl", "delta_low": 0.05, "delta_high": 0.06, "max_ratio": 2.0},
        continuous=False,
    ),
    "clip_cov": Case(algorithms.clip_cov_loss, CLIPS, ("selected",)),
    "kl_cov": Case(algorithms.kl_cov_loss, {"cov_kl_coef": 0.5}, ("selected",)),
    "kl_cov_k3": Case(algorithms.kl_cov_loss, {"cov_kl_coef": 0.5, "cov_kl_kind": "k3"}, ("selected",)),
}

STOPPED_GRADIENT = {"gspo_token", "cispo", "dppo_tv", "dppo_kl"}
"""Losses whose weight carries no gradient, so that finite differences do not match their gradient."""

SEQUENCE = {"gspo", "gspo_token", "gmpo"}
"""Losses with one ratio per row."""


def columns(seed: int, num_rows: int = 6, num_positions: int = 7) -> Columns:
    """Returns float64 columns of an off-policy batch; the first row is fully masked."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_positions)
    draws = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
    logprobs = -0.05 - draws[0].abs()
    share = torch.linspace(0, 1, max(num_rows, 1))[:num_rows, None]
    return {
        "logprobs": logprobs,
        "old_logprobs": (logprobs + 0.4 * draws[1]).clamp(max=-0.01),
        "behavior_logprobs": (logprobs + 0.6 * draws[2]).clamp(max=-0.01),
        "advantages": draws[3],
        "selected": draws[4] > 0.8,
        "mask": torch.rand(*shape, generator=generator) < share,
    }


def take(table: Columns, rows: list[int]) -> Columns:
    return {name: column[rows] for name, column in table.items()}


def with_gradient(table: Columns) -> Columns:
    return table | {"logprobs": table["logprobs"].detach().clone().requires_grad_()}


def gradient(case: Case, table: Columns) -> Tensor:
    """Returns the gradient of the summed loss with respect to the log-probabilities."""
    table = with_gradient(table)
    return torch.autograd.grad(case(table)[0].sum(), table["logprobs"])[0]
