"""Settings of the vLLM engine."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from flowrl.config.base import Config, ConfigError, DeviceKind

DEFAULT_CACHE_GB = 1.0
"""KV cache of vLLM on a CPU, or if the plan cannot determine it."""

CACHE_SHARE = 0.9
"""Share of the free memory of a GPU that becomes the KV cache. The rest covers errors of the estimate."""


_CACHE = "set vllm.kv_cache_gb, or --kv-cache-gb of a command"
_FIXED = "flowrl needs its value"
_NO_CODE = "flowrl runs no code of a model"
_NO_PLUGIN = "flowrl loads no plugins of vLLM"

OWN_ARGUMENTS: Mapping[str, str] = {
    "model": "set the path of the model",
    "model_weights": "set the path of the model",
    "dtype": "set vllm.dtype",
    "quantization": "set quantization of the role, or --quantization of a command",
    "quantization_config": "set quantization of the role, or --quantization of a command",
    "max_model_len": "set vllm.max_model_len",
    "max_num_seqs": "set max_num_seqs of the role",
    "kv_cache_memory_bytes": _CACHE,
    "gpu_memory_utilization": _CACHE,
    "num_gpu_blocks_override": _CACHE,
    "enable_prefix_caching": "set vllm.prefix_caching",
    "enforce_eager": "set vllm.graphs",
    "async_scheduling": "set vllm.async_scheduling",
    "enable_sleep_mode": "set vllm.sleep",
    "tensor_parallel_size": "set tp of the role in the placement, or --tp of a command",
    "pipeline_parallel_size": "set pp of the role in the placement, or --pp of a command",
    "prefill_context_parallel_size": "set tp of the role in the placement, or --tp of a command",
    "device_ids": "the placement selects devices",
    "served_model_name": "flowrl serve has --name",
    "distributed_executor_backend": "the placement decides on processes",
    "trust_remote_code": _NO_CODE,
    "code_revision": _NO_CODE,
    "model_class_overrides": _NO_CODE,
    "reasoning_parser_plugin": _NO_PLUGIN,
    "kv_transfer_config": _NO_PLUGIN,
    "revision": "set the path of the model",
    "runner": _FIXED,
    "convert": _FIXED,
    "load_format": "flowrl loads the weights of the path",
    "hf_overrides": "the trainer would have another model: change config.json of the model",
    "watermark_config": "it would change the distribution that the trainer assumes",
    "logits_processors": "they would change the distribution that the trainer assumes",
    "logprobs_mode": _FIXED,
    "generation_config": _FIXED,
    "override_generation_config": _FIXED,
    "skip_tokenizer_init": _FIXED,
    "scheduler_cls": _FIXED,
    "worker_cls": _FIXED,
    "worker_extension_cls": _FIXED,
    "weight_transfer_config": _FIXED,
    "spec_method": "set speculative_config",
    "spec_model": "set speculative_config",
    "spec_tokens": "set speculative_config",
}
"""Argument of vLLM's engine that flowrl does not pass on -> what to do instead, or why not."""

_OWN_PREFIXES: Mapping[str, str] = {
    "data_parallel_": "give the role more devices",
    "tokenizer": "flowrl tokenizes prompts itself",
    "nnodes": "the placement selects the nodes of a replica",
    "node_rank": "the placement selects the nodes of a replica",
    "master_": "the placement selects the nodes of a replica",
}

SPECULATIVE_METHODS = ("ngram", "suffix")
"""Methods of speculative decoding without a draft model, which a weight sync would not update."""


def find_rejected_argument(arguments: Mapping[str, Any]) -> str | None:
    """Returns why flowrl does not pass one of these arguments to vLLM's engine. Returns None if it passes them all."""
    for name in arguments:
        prefixes = (text for prefix, text in _OWN_PREFIXES.items() if name.startswith(prefix))
        if (instead := OWN_ARGUMENTS.get(name) or next(prefixes, None)) is not None:
            return f"{name} cannot be set here ({instead}): remove it"
    speculative = arguments.get("speculative_config")
    if speculative is None:
        return None
    if not isinstance(speculative, Mapping):
        return (
            f"speculative_config is {speculative}, but must be a mapping: write it like {{method: ngram, "
            f"num_speculative_tokens: 4}}"
        )
    if (method := speculative.get("method")) not in SPECULATIVE_METHODS:
        return (
            f"speculative_config.method is {method}, whose draft model a weight sync would not update: set method "
            f"{' or '.join(SPECULATIVE_METHODS)}, which have none"
        )
    return None


def find_speculation_problem(arguments: Mapping[str, Any], device: DeviceKind) -> str | None:
    """Returns the problem of speculative decoding on a kind of devices, or None.

    On CPUs, vLLM 0.32 accepts proposed tokens that it should reject. Only greedy responses are right.
    """
    if device == "cpu" and arguments.get("speculative_config"):
        return "speculative_config is set, with which vLLM samples wrong tokens on CPUs"
    return None


class VllmConfig(Config):
    """Settings of the vLLM engine. All except `engine_args` change only time and memory."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of weights and activations. Null: on GPUs the actor's `compute_dtype`, and for a judge bfloat16; on CPUs
    the dtype of the model. Weights are cast before they are sent.
    """

    kv_cache_gb: PositiveFloat | None = None
    """Memory of the KV cache on each device of a replica, in GB (10^9 bytes). Sequences that do not fit wait in a
    queue. Null: 1 on CPUs; on GPUs 90 % of the memory that the plan leaves free, and 1 if the size of the model is
    unknown.
    """

    max_model_len: PositiveInt | None = None
    """Longest sequence (prompt plus response). Null is the minimum of the model's limit and the KV cache's capacity."""

    prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes."""

    graphs: bool = True
    """Use CUDA graphs and compilation on GPUs. The start is slower and decoding is faster."""

    async_scheduling: bool | Literal["auto"] = False
    """Schedule each step while the previous one computes, so that a GPU does not wait for the scheduler. `auto` does so
    on GPUs without speculative decoding. vLLM has no asynchronous scheduling on CPUs."""

    sleep: bool | None = None
    """Free the devices while other roles use them: offload weights to host memory and drop the KV cache. Null is true
    on GPUs and false on CPUs. With schedule async, a rollout cannot sleep. False lets other roles use the devices
    anyway."""

    engine_args: Mapping[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, by name. They may change results. Those that flowrl sets itself are
    rejected."""

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        if (problem := find_rejected_argument(value)) is not None:
            raise ValueError(problem)
        return value

    def uses_async_scheduling(self, *, on_gpus: bool) -> bool:
        """Returns whether vLLM shall use its asynchronous scheduler."""
        return on_gpus and not self.speculates if self.async_scheduling == "auto" else self.async_scheduling

    @property
    def speculates(self) -> bool:
        """Whether vLLM uses speculative decoding."""
        return self.engine_args.get("speculative_config") is not None

    @model_validator(mode="after")
    def _check_async_scheduling(self) -> Self:
        if self.async_scheduling is True and self.speculates:
            raise ValueError(
                "async_scheduling is true, which vLLM does not support with the methods of speculative_config: set it "
                "to auto or false, or remove engine_args.speculative_config"
            )
        return self

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on each device."""
        return int((DEFAULT_CACHE_GB if self.kv_cache_gb is None else self.kv_cache_gb) * 1e9)


class PlannedVllmConfig(VllmConfig):
    """Settings of vLLM on a GPU whose KV cache uses the memory that a plan leaves free. Not read from files."""

    setting: str
    """Name of the setting of the KV cache, for messages."""

    needed: NonNegativeInt
    """Peak bytes on the device without this KV cache, while the engine holds it."""

    present: NonNegativeInt
    """Bytes that are in use on the device when the engine starts, according to the plan. Includes the CUDA context
    with which the engine measures the free memory."""

    least: NonNegativeInt
    """Smallest usable KV cache: bytes of one sequence of full length."""

    limit: PositiveInt | None
    """Bytes in `placement.memory_gb`; None uses the whole device."""

    num_caches: PositiveInt = 1
    """Number of KV caches that divide the free memory, because they are on the device at the same time."""

    def fit_cache(self, total: int, free: int) -> int:
        """Returns the bytes of the KV cache on a device with `total` bytes, of which `free` are free at the start.

        Subtracts the memory that other programs use. The result may be below `least`, and below 0.
        """
        unplanned = max(0, total - free - self.present)
        return int(CACHE_SHARE * (min(total, self.limit or total) - self.needed - unplanned) / self.num_caches)

    def measured_cache(self, total: int, free: int) -> int:
        """Returns the result of `fit_cache`. Raises ConfigError if the cache is below `least`."""
        num_bytes = self.fit_cache(total, free)
        if num_bytes < self.least:
            raise ConfigError(
                f"{self.setting} would be {num_bytes / 1e9:.1f}, because {free / 1e9:.1f} of "
                f"{total / 1e9:.1f} GB are free and the plan needs {self.needed / 1e9:.1f} GB for everything else, but "
                f"a sequence needs {self.least / 1e9:.1f}: end other programs on the GPU, or use one with more memory"
            )
        return num_bytes
