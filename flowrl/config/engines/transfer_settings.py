"""Settings of the weight sync."""

from typing import Literal

from pydantic import PositiveFloat

from flowrl.config.base import Config


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
