"""Merges a LoRA adapter into weights from model files, and loads the result into any rollout engine."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from flowrl.config import LoraConfig, ModelConfig, TransferConfig
from flowrl.data.dtypes import torch_dtype
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.adapters.saved_adapter import set_adapter
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.sharded_loading import stream_full_weights
from flowrl.engines.models.weights import to_arrays, to_tensors, weight_buckets, weight_shapes
from flowrl.engines.rollout.base import EngineContext, RolloutEngine, load_engine_class


class AdaptedWeights:
    """The merged weights of a base model and an adapter. Each update replaces the adapter.

    The base weights stay in the model's files. The merge runs the same operations as the actor, so the merged weights
    are bitwise equal to the actor's on the same kind of device.
    """

    def __init__(self, model: ModelConfig, lora: LoraConfig, device: torch.device) -> None:
        """Creates the base model without its weights. Adapters are merged on `device`."""
        self._model, self._device = load_policy(model, on_meta=True, merges=False), device
        add_adapter(self._model, lora)

    def set(self, adapter: Mapping[str, np.ndarray]) -> None:
        """Replaces the adapter. `adapter` has the weights of `AdapterExport`, in the format of `to_arrays`."""
        set_adapter(self._model, to_tensors(adapter))

    def load_into(self, engine: RolloutEngine, version: int, bucket_mb: float, dtype: str | None) -> None:
        """Updates an engine to the merged weights, cast to `dtype` unless it is None."""
        _load(self._model, engine, version, bucket_mb, dtype, self._device)


def start_engine(context: EngineContext) -> RolloutEngine:
    """Starts the engine of a rollout or a judge, with the initial weights.

    The engine itself reads only the base model. With `model.adapter`, this function merges the adapter, and loads the
    merged weights in an update. It does neither if the engine uses the weights of an actor.
    """
    config, model = context.config, context.model
    engine = load_engine_class(config.engine).start(replace(context, model=model.base))
    if model.adapter is not None and not (context.actor is not None and config.can_share_weights):
        merged, device = load_policy(model, on_meta=True), torch.device(context.device)
        _load(merged, engine, engine.version, TransferConfig().bucket_mb, config.sent_dtype, device)
    return engine


def _load(
    model: PreTrainedModel,
    engine: RolloutEngine,
    version: int,
    bucket_mb: float,
    dtype_name: str | None,
    device: torch.device,
) -> None:
    dtype = None if dtype_name is None else torch_dtype(dtype_name)
    engine.begin_update(version)
    for names in weight_buckets(weight_shapes(model, dtype=dtype), bucket_mb * 1e6):
        engine.receive(to_arrays(stream_full_weights(model, names, dtype, device)))
    engine.commit()
