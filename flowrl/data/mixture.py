"""Reads the sizes of a mixture of experts from the configuration of its model. Reads no weights, imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts per layer in the configuration of a language model."""

RouterScore = Literal["softmax", "sigmoid"]
"""Function that a router applies to its logits. Scores of a sigmoid are normalized to probabilities."""

ROUTER_SCORES: Mapping[str, RouterScore] = {
    "mixtral": "softmax",
    "qwen3_moe": "softmax",
    "deepseek_v3": "sigmoid",
}
"""Family (`model_type`) -> scores of its routers. Other families have no auxiliary loss, no expert parallelism, and no
memory estimate."""


@dataclass(frozen=True)
class Mixture:
    """Sizes of the experts of a model."""

    family: str
    """`model_type` in the configuration."""
    num_experts: int
    """Number of routed experts per layer."""
    per_token: int
    """Number of routed experts that process a token in a layer."""
    expert_width: int
    """Width of the MLP of an expert."""
    shared_width: int
    """Width of the MLP that processes every token in addition to the routed experts, or 0 if there is none."""
    has_experts: tuple[bool, ...]
    """For each layer, whether its MLP is a mixture of experts."""
    router_loss_coef: float | None
    """Coefficient of the auxiliary loss in the configuration, or None if the configuration has no coefficient."""


def has_experts(settings: Mapping[str, Any]) -> bool:  # Any: JSON values
    """Returns whether the configuration of a language model describes a mixture of experts."""
    counts = (settings.get(name) for name in NUM_EXPERTS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def read_mixture(settings: Mapping[str, Any]) -> Mixture | None:  # Any: as above
    """Returns the sizes of a mixture of experts, or None for other models and for families not in `ROUTER_SCORES`.

    `settings`: configuration of the language model, as in `config.json`.
    """
    family = str(settings.get("model_type"))
    if family not in ROUTER_SCORES or not has_experts(settings):
        return None
    try:
        shared = settings["n_shared_experts"] * settings["moe_intermediate_size"] if family == "deepseek_v3" else 0
        return Mixture(
            family=family,
            num_experts=next(settings[name] for name in NUM_EXPERTS if isinstance(settings.get(name), int)),
            per_token=settings["num_experts_per_tok"],
            expert_width=settings["intermediate_size" if family == "mixtral" else "moe_intermediate_size"],
            shared_width=shared,
            has_experts=tuple(_has_experts(settings, i) for i in range(settings["num_hidden_layers"])),
            router_loss_coef=settings.get("router_aux_loss_coef"),
        )
    except (KeyError, TypeError):
        return None


def _has_experts(settings: Mapping[str, Any], layer: int) -> bool:  # Any: as above
    if settings["model_type"] == "deepseek_v3":
        return layer >= settings.get("first_k_dense_replace", 0)
    is_sparse = (layer + 1) % settings.get("decoder_sparse_step", 1) == 0
    return is_sparse and layer not in (settings.get("mlp_only_layers") or ())
