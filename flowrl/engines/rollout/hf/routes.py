"""Records the experts that the routers of a mixture of experts choose while the rollout generates.

Shape suffixes: B rows of a pass, L tokens, N = B x L tokens of the pass, M routes of a token: experts per token times
layers with experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.config import UserError
from flowrl.engines.models.routing import Routes, find_routers, mixture_of, replace_routes, routes_dtype
from flowrl.engines.rollout.hf.kv_cache import SlotCache


class RouteRecorder:
    """Stores routes in the last layer of a KV cache, as keys with one head: the values of the column `ROUTES`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UserError if the model has no routers of a known family."""
        mixture = mixture_of(model)
        if mixture is None:
            raise UserError(
                f"rollout.router_replay is true, but {type(model).__name__} is no mixture of experts of a family in "
                f"docs/models.md: set it to false"
            )
        self._routers, self._dtype = find_routers(model), routes_dtype(mixture)
        self.no_routes = torch.zeros(0, len(self._routers) * mixture.per_token, dtype=self._dtype).numpy()
        """An empty array of routes, [0, M]."""

    @contextmanager
    def recording(self, cache: SlotCache) -> Iterator[None]:
        """Inside the `with` block, a forward pass whose tokens `cache` expects stores the routes of its tokens."""
        chosen: list[Tensor] = []

        def record(layer: int, routes: Routes) -> Routes:
            chosen.append(routes.experts)
            return routes

        with replace_routes(self._routers, record):
            yield
        routes_NM = torch.stack(chosen, dim=1).flatten(1).add(1).to(self._dtype)
        routes_B1LM = routes_NM.unflatten(0, (cache.passed_rows, -1))[:, None]
        # Keys need values. An empty dimension could not be viewed as rows.
        cache.update(routes_B1LM, routes_B1LM[..., :1], len(cache.layers) - 1)

    def read(self, cache: SlotCache, slot: int, num_tokens: int) -> np.ndarray:
        """Returns the routes of the first tokens of a row, [num_tokens, M]."""
        routes_1LM, _ = cache.read_layer(len(cache.layers) - 1, slot, num_tokens)
        return routes_1LM[0].cpu().numpy()
