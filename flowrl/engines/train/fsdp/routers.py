"""Routers of a mixture of experts in training: the auxiliary loss with its metrics, and the replay of routes.

The loss balances the load of the experts. The loss of a layer is E sum_e f_e P_e
(`flowrl.algorithms.losses.load_balance`). The share f_e and the mean probability P_e of expert e are computed over all
tokens of a call of `forward_backward`. These are the tokens of all ranks and micro-batches, without padding. The loss
is the mean over the layers. It therefore depends neither on micro-batches nor on the number of ranks. Shares of a
single micro-batch, as in transformers, would depend on both. The gradient of a token needs the shares of all tokens. If
a rank has several micro-batches, an additional pass without gradients counts the routes before the first backward pass.

Router replay passes each token to the experts that the rollout's routers selected. The rollout computes with other
kernels than the trainer, and often in another precision. Without replay, a router of the trainer may select other
experts for a token. The log-probability of the token then changes by much more than by rounding. Gradients flow through
the weights of the selected experts. Ma et al. 2025, https://arxiv.org/abs/2510.11370.

Shape suffixes: N tokens of a micro-batch, K experts of a token, E experts, L layers with experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, Self, get_args

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from flowrl.algorithms.losses.load_balance import count_routes, load_balance_loss, router_probabilities
from flowrl.config import UserError
from flowrl.data.metric import Mean, Metric
from flowrl.data.mixture import ROUTER_SCORES
from flowrl.engines.models.routing import Routes, find_routers, mixture_of, replace_routes, route_weights
from flowrl.engines.parallel.rank_mesh import RankMesh


class RouterLoss:
    """The auxiliary loss of one model. The backward pass adds its gradient to the gradient of each router's logits."""

    def __init__(self, model: PreTrainedModel, coef: float | None, mesh: RankMesh) -> None:
        """`coef`: coefficient of the loss. None uses the coefficient in the model's configuration. Raises UserError if
        the configuration then has no coefficient.
        """
        mixture = mixture_of(model)
        assert mixture is not None, "the model is a mixture of experts"
        coef = mixture.router_loss_coef if coef is None else coef
        if coef is None:
            raise UserError(
                f"router_loss_coef is null, which selects the coefficient of the model, but the config.json of "
                f"{type(model).__name__} has no router_aux_loss_coef: set router_loss_coef, 0 for no loss"
            )
        self.coef = coef
        self._routers = find_routers(model)
        self._mixture, self._mesh = mixture, mesh
        self._mask_N: Tensor | None = None
        """Mask of the counted tokens of the current micro-batch."""
        self._is_counting = False
        self._counts_LE: Tensor | None = None
        self._sums_LE: Tensor | None = None
        """`_counts_LE` and `_sums_LE`: numbers of tokens and sums of probabilities on this rank since `active`."""
        self._all_counts_LE: Tensor | None = None
        """Numbers of tokens over all ranks and micro-batches. None before `share_counts`."""
        self._factor = 0.0

    @contextmanager
    def active(self, device: torch.device, factor: float) -> Iterator[None]:
        """Inside the `with` block, backward passes add the gradient of `factor` times the coefficient times the loss.

        All ranks enter the block together.
        """
        shape = len(self._routers), self._mixture.num_experts
        self._counts_LE = torch.zeros(shape, dtype=torch.int64, device=device)
        self._sums_LE = torch.zeros(shape, dtype=torch.float64, device=device)
        self._all_counts_LE, self._factor = None, factor
        with replace_routes(self._routers, self._observe):
            yield

    def count_all(self, passes: Sequence[Callable[[], object]]) -> None:
        """Runs forward passes without gradients that count the routes of this rank, and sums the counts over all ranks.
        All ranks call this together.
        """
        with torch.no_grad():
            for run in passes:
                run()
        self.share_counts()
        assert self._counts_LE is not None and self._sums_LE is not None, "inside active"
        # Reset, because the training passes count the routes again.
        self._counts_LE, self._sums_LE = torch.zeros_like(self._counts_LE), torch.zeros_like(self._sums_LE)

    @property
    def needs_counts(self) -> bool:
        """Whether backward passes need the routes of all tokens, which are unknown before `share_counts`."""
        return self.coef > 0 and self._all_counts_LE is None

    @contextmanager
    def counting(self, mask_N: Tensor) -> Iterator[None]:
        """Inside the `with` block, counts the routes of a forward pass. `mask_N` marks the counted tokens, also for the
        following backward pass.
        """
        self._mask_N, self._is_counting = mask_N, True
        try:
            yield
        finally:
            self._is_counting = False

    def share_counts(self) -> None:
        """Sums the counts over all ranks for the following backward passes. All ranks call this together."""
        assert self._counts_LE is not None, "inside active"
        self._all_counts_LE = _sum(self._counts_LE, self._mesh.data)

    def metrics(self) -> dict[str, Metric]:
        """Returns the metrics of the routers, for the tokens of this rank and of its sequence-parallel peers.

        The metrics are the loss without the coefficient, the load of each expert over all layers, and statistics of the
        loads in each layer.
        """
        assert self._counts_LE is not None and self._sums_LE is not None, "inside active"
        # Not summed over other ranks, which may still sum gradients. The controller merges their metrics.
        counts_LE, sums_LE = (
            _sum(values, self._mesh.sequence).cpu().numpy() for values in (self._counts_LE, self._sums_LE)
        )
        counts_E, num_experts = counts_LE.sum(0), self._mixture.num_experts
        metrics: dict[str, Metric] = {
            f"expert_load/{i}": Mean(num_experts * int(counts_E[i]), int(counts_E.sum())) for i in range(num_experts)
        }
        return metrics | {name: ExpertLoad(name, counts_LE, sums_LE) for name in get_args(Statistic)}

    def gradient(self, layer: int, logits_NE: Tensor) -> Tensor:
        """Returns the gradient of the loss with respect to the logits of a router."""
        assert self._all_counts_LE is not None and self._mask_N is not None, "the routes are shared"
        counts_E = self._all_counts_LE[layer]
        with torch.enable_grad():
            leaf_NE = logits_NE.detach().requires_grad_()
            term = load_balance_loss(
                router_probabilities(leaf_NE, scores=ROUTER_SCORES[self._mixture.family]),
                counts_E,
                self._mask_N,
                num_tokens=counts_E.sum().double() / self._mixture.per_token,
            )
            (gradient_NE,) = torch.autograd.grad(term * (self._factor * self.coef / len(self._routers)), leaf_NE)
        return gradient_NE

    def _observe(self, layer: int, routes: Routes) -> Routes:
        """Counts the routes of a layer in the forward pass, and adds the gradient of the loss in the backward pass."""
        if self._is_counting:
            assert self._mask_N is not None and self._counts_LE is not None and self._sums_LE is not None
            with torch.no_grad():
                probabilities_NE = router_probabilities(
                    routes.logits, scores=ROUTER_SCORES[self._mixture.family]
                ).masked_fill(~self._mask_N[:, None], 0)
                self._sums_LE[layer] += probabilities_NE.sum(0)
                self._counts_LE[layer] += count_routes(
                    routes.experts, self._mask_N, num_experts=self._mixture.num_experts
                )
        if self.coef == 0 or not torch.is_grad_enabled() or not routes.logits.requires_grad:
            return routes
        return routes._replace(weights=_AddGradient.apply(routes.weights, routes.logits, self, layer))


def _sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns the sum of the values of all ranks of a group."""
    total = values.clone()
    if group is not None:
        distributed.all_reduce(total, group=group)
    return total


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    loss: RouterLoss
    layer: int

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _AddGradient(torch.autograd.Function):
    """Returns the weights of a router unchanged. The backward pass adds the auxiliary loss's gradient to the logits'
    gradient.

    The auxiliary loss is not added to the loss of a micro-batch, because its gradient also depends on the routes of
    later micro-batches. In the backward pass, gradient checkpointing has recomputed the logits, and FSDP2 has gathered
    the weights.
    """

    @staticmethod
    def forward(ctx: _Context, weights_NK: Tensor, logits_NE: Tensor, loss: RouterLoss, layer: int) -> Tensor:
        ctx.save_for_backward(logits_NE)
        ctx.loss, ctx.layer = loss, layer
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch leaves the arguments open)
        ctx: _Context, gradient_NK: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        (logits_NE,) = ctx.saved_tensors
        return gradient_NK, ctx.loss.gradient(ctx.layer, logits_NE), None, None


Statistic = Literal["router_loss", "expert_load_max", "dead_experts"]
"""`router_loss`: load-balancing loss, as a mean over the layers. `expert_load_max`: load of the expert with most
tokens, as a multiple of the mean load, in the layer where it is largest. `dead_experts`: share of the experts that
receive no token, over all layers."""


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """A statistic of the routes of some tokens. `merge` returns the statistic for the tokens of both objects."""

    statistic: Statistic
    counts: np.ndarray
    """[L, E], number of tokens of each expert."""
    probability_sums: np.ndarray
    """[L, E], sum of the probabilities of each expert over the tokens."""

    def merge(self, other: Self) -> "ExpertLoad":
        return ExpertLoad(self.statistic, self.counts + other.counts, self.probability_sums + other.probability_sums)

    def result(self) -> float:
        if self.statistic == "dead_experts":
            return float((self.counts == 0).mean())
        if self.statistic == "expert_load_max":
            return float((self.counts / self.counts.mean(1, keepdims=True)).max())
        # The probabilities of a token sum up to 1.
        num_tokens_L1 = self.probability_sums.sum(1, keepdims=True)
        products_LE = self.counts / num_tokens_L1 * self.probability_sums / num_tokens_L1
        return float(self.counts.shape[1] * products_LE.sum(1).mean())


class RouteReplay:
    """Makes the routers of one model use given routes."""

    def __init__(self, model: PreTrainedModel) -> None:
        mixture = mixture_of(model)
        assert mixture is not None, "the model is a mixture of experts"
        self._routers, self._mixture = find_routers(model), mixture
        self._routes_NLK: Tensor | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the `with` block, forward passes use the routes of `set`, also when gradient checkpointing repeats
        them.
        """
        with replace_routes(self._routers, self._replace):
            yield

    def set(self, routes: Tensor) -> None:
        """Sets the routes for the next passes. `routes` has the values of the column `routes`, [..., L x K]."""
        self._routes_NLK = routes.reshape(-1, len(self._routers), self._mixture.per_token).long()

    def _replace(self, layer: int, routes: Routes) -> Routes:
        assert self._routes_NLK is not None, "set before a pass"
        replayed_NK = self._routes_NLK[:, layer]
        experts_NK = torch.where(replayed_NK > 0, replayed_NK - 1, routes.experts)
        weights_NK = route_weights(self._mixture.family, self._routers[layer], routes.logits, experts_NK)
        return Routes(routes.logits, weights_NK.to(routes.weights.dtype), experts_NK)
