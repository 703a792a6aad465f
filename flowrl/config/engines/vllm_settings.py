"""Settings of the vLLM engine."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from flowrl.config.base import Config, ConfigError

DEFAULT_CACHE_GB = 1.0
"""KV cache of vLLM on a CPU, or if the plan cannot determine it."""

CACHE_SHARE = 0.9
"""Share of the free memory of a GPU that becomes the KV cache. The rest covers errors of the estimate."""


class VllmConfig(Config):
    """Settings of the vLLM engine. They change only time and memory."""

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
    on GPUs. vLLM has no asynchronous scheduling on CPUs."""

    sleep: bool | None = None
    """Free the devices while other roles use them: offload weights to host memory and drop the KV cache. Null is true
    on GPUs and false on CPUs. With schedule async, a rollout cannot sleep. False lets other roles use the devices
    anyway."""

    def uses_async_scheduling(self, *, on_gpus: bool) -> bool:
        """Returns whether vLLM shall use its asynchronous scheduler."""
        return on_gpus if self.async_scheduling == "auto" else self.async_scheduling

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
