"""Router replay: passes of a mixture of experts with the experts that a rollout has chosen.

The rollout computes with other kernels, and often in another precision. A router may then choose other experts for a
token, and the log-probability of the token changes by much more than by rounding. With the routes of the rollout, the
trained policy is again the policy that has sampled. Gradients flow through the weights of the chosen experts. Ma et al.
2025, https://arxiv.org/abs/2510.11370.

Shape suffixes: N tokens of a micro-batch, K experts of a token, L layers with experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.engines.models.routing import Routes, find_routers, mixture_of, replace_routes, route_weights


class RouteReplay:
    """Replaces the routes of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        mixture = mixture_of(model)
        assert mixture is not None, "the model is a mixture of experts"
        self._routers, self._mixture = find_routers(model), mixture
        self._routes_NLK: Tensor | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the `with` block, forward passes, also those of gradient checkpointing, use the routes of `set`."""
        with replace_routes(self._routers, self._replace):
            yield

    def set(self, routes: Tensor) -> None:
        """Sets the routes of the tokens of the next passes: values of the column `routes`, [..., L x K]."""
        self._routes_NLK = routes.reshape(-1, len(self._routers), self._mixture.per_token).long()

    def _replace(self, layer: int, routes: Routes) -> Routes:
        assert self._routes_NLK is not None, "set before a pass"
        replayed_NK = self._routes_NLK[:, layer]
        experts_NK = torch.where(replayed_NK > 0, replayed_NK - 1, routes.experts)
        weights_NK = route_weights(self._mixture.family, self._routers[layer], routes.logits, experts_NK)
        return Routes(routes.logits, weights_NK.to(routes.weights.dtype), experts_NK)
