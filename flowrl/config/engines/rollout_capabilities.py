"""Capabilities of a rollout engine: facts from which a run is checked and planned without importing the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flowrl.config.base import DeviceKind

GpuTransport = Literal["cuda_ipc", "nccl"]


@dataclass(frozen=True)
class Package:
    """A Python package that an engine imports."""

    module: str
    """Import name."""
    distributions: tuple[str, ...]
    """Names under which the package can be installed."""
    install: str
    """Command that installs the package."""


@dataclass(frozen=True)
class Quantization:
    """Requirements of one quantization in an engine."""

    devices: tuple[DeviceKind, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] | None = None
    """Supported dtypes of the weights before the quantization; None is all dtypes of the engine."""
    packages: tuple[Package, ...] = ()
    """Packages that the quantization needs in addition to the engine's packages."""
    deterministic: bool = True
    """On GPUs, the logits of a row do not depend on the other rows of the batch, as `deterministic` of a run
    requires."""


@dataclass(frozen=True)
class EngineCapabilities:
    """Facts about a rollout engine. The defaults describe an engine that can only generate batches."""

    own_process: bool
    """The engine needs a process without other roles. Otherwise, it also runs in the processes of the actor and in the
    inline backend."""
    shares_weights: bool = False
    """In a process of the actor, the engine generates with the actor's weights instead of a copy, except with
    quantization."""
    gpu_transports: tuple[GpuTransport, ...] = ()
    """Transports of weights between GPUs. Every engine also loads weights from the object store."""
    streaming: bool = False
    """The engine has `add`, `poll` and `abort`, which `schedule.kind: async` with `max_staleness` above 0 requires."""
    sleep: bool = False
    """The engine can offload its device memory while other processes use the devices."""
    keeps_turn_cache: bool = False
    """The engine supports both values of `rollout.keep_turn_cache`: it can keep the KV cache of an episode between two
    turns, or prefill each turn again."""
    returns_routes: bool = False
    """The engine returns the experts that a mixture of experts has chosen (`rollout.router_replay`)."""
    dimensions: tuple[Literal["tp", "pp"], ...] = ()
    """Parallel sizes that a role with this engine may have in the placement. One engine then uses several devices."""
    partial_models: bool = False
    """With `model.strict: false`, the engine treats missing and unexpected weights in a model's files as the trainer
    does."""
    matches_trainer: bool = False
    """The engine computes with the model code of the trainer, so log-probabilities differ only by rounding. Otherwise,
    `algorithm.correction: auto` corrects the difference."""
    logprobs_at_temperature: bool = True
    """Log-probabilities refer to the sampling distribution. False: they ignore the temperature, which must be 1."""
    min_temperature: float = 0.0
    """Smallest sampling temperature."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Supported dtypes of the weights, the preferred one first."""
    head_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Kind of device -> supported sizes of attention heads. A kind that is missing supports all sizes."""
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)
    packages: tuple[Package, ...] = ()
    """Packages that the engine needs. `flowrl doctor` prints their versions."""
    settings: str | None = None
    """Name of the group of settings in `RolloutConfig` that only this engine has."""
    options: tuple[str, ...] = ()
    """Names that the engine accepts in `rollout.options`."""
    memory: str | None = None
    """`module:function` that estimates the memory of the engine on a device (`flowrl.memory.rollout_memory`). None: the
    memory is unknown, and `flowrl plan` reports this."""

    def __post_init__(self) -> None:
        if self.own_process and self.shares_weights:
            raise ValueError("own_process and shares_weights are both true: an engine shares weights within a process")
