"""The routers of a mixture of experts. A router selects the experts of each token in a layer.

transformers' routers return (logits [N, E], weights [N, K], experts [N, K]) for N tokens, E experts per layer and K
experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from flowrl.data.mixture import ROUTER_SCORES, Mixture, read_mixture

EXPERT_PARALLEL = "flowrl_expert_parallel"
"""Name of the experts implementation in transformers that `flowrl.engines.parallel.expert_parallel` registers. It
requires that the experts are sharded over ranks."""


ROUTES = "routes"
"""Token column with the experts that the rollout's routers selected, [L x K] per token for L layers with experts. A
value is the index of the expert plus 1. A token with zeros has no route, so the routers of the trained model select its
experts."""


def experts_implementation(dtype: torch.dtype) -> str | None:
    """Returns the name of transformers' experts implementation for weights of a dtype. None selects the default, which
    uses grouped matrix products. torch does not support these for float64.
    """
    return "eager" if dtype == torch.float64 else None


class Routes(NamedTuple):
    """Output of a router."""

    logits: Tensor
    """Router logits, [N, E]."""
    weights: Tensor
    """Weights of the outputs of the selected experts, [N, K]."""
    experts: Tensor
    """Indices of the selected experts, int64 [N, K]."""


def mixture_of(model: PreTrainedModel) -> Mixture | None:
    """Returns the sizes of a model's experts. Returns None for dense models and for unknown families."""
    return read_mixture(model.config.get_text_config().to_dict())


def find_routers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the routers of a model in the order of its layers. The list is empty for dense models and unknown
    families.
    """
    recorder = (model._can_record_outputs or {}).get("router_logits")
    if mixture_of(model) is None or not isinstance(recorder, OutputRecorder):
        return []
    return [module for module in model.modules() if isinstance(module, recorder.target_class)]


def routes_dtype(mixture: Mixture) -> torch.dtype:
    """Returns the dtype of the column `ROUTES`."""
    return torch.uint8 if mixture.num_experts < 255 else torch.int16


def route_weights(family: str, router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Computes the weights of the selected experts as the router of a family does. Returns [N, K] in at least float32.

    Args:
        family: family of the model in `ROUTER_SCORES`.
        router: the router, whose attributes contain further settings.
        logits: [N, E].
        experts: int64 [N, K].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.sigmoid() if ROUTER_SCORES[family] == "sigmoid" else logits.softmax(-1)
    weights = scores.gather(-1, experts)
    if family == "mixtral" or getattr(router, "norm_topk_prob", False):
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if family == "deepseek_v3" else 0))
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module has the matrices of all experts of a layer, in weights with three dimensions."""
    weights = list(module.parameters(recurse=False))
    return bool(weights) and all(weight.ndim == 3 for weight in weights)


@contextmanager
def replace_routes(routers: Sequence[nn.Module], replace: Callable[[int, Routes], Routes]) -> Iterator[None]:
    """Inside the `with` block, replaces the output of each router by the result of `replace(index of the router,
    output)`.
    """

    def make_hook(index: int) -> Callable[..., tuple[Tensor, ...]]:
        def hook(module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # Any: unused
            return tuple(replace(index, Routes(*output)))

        return hook

    handles = [router.register_forward_hook(make_hook(i)) for i, router in enumerate(routers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
