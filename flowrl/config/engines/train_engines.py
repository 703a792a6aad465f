"""Capabilities of training engines: facts from which a run is checked and planned without importing an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Literal

from pydantic import AfterValidator

from flowrl.config.base import CUSTOM_CLASS, check_name, find_capabilities

Dimension = Literal["dp", "sp", "tp", "pp"]
"""A parallel dimension of a role: data, sequence, tensor or pipeline."""

DEFAULT_TRAIN_ENGINE = "fsdp"


@dataclass(frozen=True)
class TrainCapabilities:
    """Facts about a training engine. The defaults describe an engine that trains policies on one or more replicas."""

    outputs: tuple[str, ...] = ("logprobs", "entropy")
    """Outputs that the engine computes (`flowrl.engines.train.base`). Policies need `logprobs` and `entropy`, critics
    `values`, and reward models `scores`."""
    dimensions: tuple[Dimension, ...] = ("dp",)
    """Parallel dimensions of the placement that may be larger than 1."""
    settings: tuple[str, ...] = ("max_tokens_per_microbatch",)
    """Settings of `EngineConfig` that the engine reads. All other settings must have their defaults."""
    options: tuple[str, ...] = ()
    """Names that the engine accepts in `engine.options`."""
    adapters: bool = False
    """The engine has the method of `AdapterExport`. It trains LoRA adapters, and can start from saved adapters."""
    shares_weights: bool = False
    """The engine has the methods of `SharedModel`. A rollout or a reference in its process can then use its model."""
    estimates_memory: bool = False
    """`flowrl plan` estimates the engine's memory. This is possible only for the included engine."""


TRAIN_ENGINES: Mapping[str, TrainCapabilities] = {
    DEFAULT_TRAIN_ENGINE: TrainCapabilities(
        outputs=("logprobs", "entropy", "topk_logprobs", "topk_ids", "hidden", "values", "scores"),
        dimensions=("dp", "sp", "tp", "pp"),
        settings=(
            "strategy",
            "shard_ranks",
            "reshard_after_forward",
            "expert_parallel",
            "offload",
            "compute_dtype",
            "gradient_checkpointing",
            "offload_activations",
            "sequence_parallel_norms",
            "attention",
            "compile",
            "overlap_all_reduce",
            "packing",
            "max_tokens_per_microbatch",
        ),
        adapters=True,
        shares_weights=True,
        estimates_memory=True,
    )
}
"""Name -> capabilities of the included engines. `flowrl.engines.train.base` has their classes."""


@cache
def get_train_capabilities(name: str) -> TrainCapabilities:
    """Returns the capabilities of a training engine. Imports only a user's engine. Raises ImportNameError (a
    ValueError).
    """
    return find_capabilities(name, TRAIN_ENGINES, "training engine", TrainCapabilities)


_check_name = partial(
    check_name, what="training engine", names=tuple(TRAIN_ENGINES), custom=CUSTOM_CLASS, load=get_train_capabilities
)
TrainEngineName = Annotated[str, AfterValidator(_check_name)]
"""Name of a training engine. A user's engine is imported."""
