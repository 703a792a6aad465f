"""Base class of training engines that hold a module and its optimizer in each process.

It saves and restores the tensors of the module and the optimizer by name, also if they are sharded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flowrl.data.metric import Metric
from flowrl.devices.device import local_tensor
from flowrl.engines.models.parameters import unique_parameters
from flowrl.engines.train.steps import OptimizerSteps

MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of the names of weights and of optimizer tensors."""

BLOCK = 64
"""Number of values of a quantized optimizer tensor that share a scale. Most models have multiples of 64 as widths."""

CODES, SCALE = ".codes", ".scale"
"""Suffixes of the names of the parts of a quantized optimizer tensor."""


def module_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Returns the trained weights of a module and the tensors of its optimizer. Missing optimizer tensors are created.

    A tied weight appears only under the first of its names.
    """
    tied = {name for names, _ in unique_parameters(model) for name in names[1:]}
    weights = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    state: dict[str, Any] = {MODEL + name: weight for name, weight in weights.items() if name not in tied}
    if optimizer is not None:
        # Any: torch's type also covers flattened dictionaries.
        moments: Any = get_optimizer_state_dict(model, optimizer)["state"]
        for name, own in moments.items():
            for key, value in own.items():
                parts = split_quantized(value) if isinstance(value, Tensor) else {"": value}
                state |= {f"{OPTIMIZER}{name}.{key}{part}": tensor for part, tensor in parts.items()}
    return state


def load_module_state(model: nn.Module, optimizer: Optimizer | None, tensors: Mapping[str, Tensor]) -> None:
    """Copies the tensors of `module_state` into a module and its optimizer. Optimizer tensors may be missing.

    Tensors of `module_state` that were overwritten in place must also be loaded, because some of them are copies.
    """
    weights: dict[str, Any] = {  # Any: torch's type also covers other state
        name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)
    }
    # Not strict, because frozen weights and the other names of tied weights are missing.
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))
    if optimizer is None or not any(name.startswith(OPTIMIZER) for name in tensors):
        return
    state: Any = get_optimizer_state_dict(model, optimizer)
    for name, own in state["state"].items():
        for key, value in own.items():
            parts = {part: tensors[f"{OPTIMIZER}{name}.{key}{part}"] for part in split_quantized(value)}
            own[key] = parts[""] if "" in parts else _join_quantized(value, parts)
    set_optimizer_state_dict(model, optimizer, state)


def split_quantized(value: Tensor) -> dict[str, Tensor]:
    """Splits a quantized optimizer tensor into codes and scales, by the suffix of their names. Returns any other tensor
    unchanged, under the suffix "".

    The codes have the shape of the tensor, [..., C], and the scales the shape [..., number of blocks of a row]. Both
    are sharded like the tensor, and share memory with it.
    """
    local = local_tensor(value)
    if not is_traceable_wrapper_subclass(local):
        return {"": value}
    quantized: Any = local  # Any: torchao's type, which is not always installed
    *rows, columns = quantized.codes.shape
    scale = quantized.scale.view(*rows, columns // BLOCK)
    return {CODES: shard_like(quantized.codes, value), SCALE: shard_like(scale, value)}


def _join_quantized(value: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Joins the parts of `split_quantized` to a quantized tensor with the quantization map, type and sharding of
    `value`.
    """
    quantized: Any = local_tensor(value)  # Any: as above
    _, context = quantized.__tensor_flatten__()
    own = {
        "codes": local_tensor(parts[CODES]).to(quantized.device),
        "scale": local_tensor(parts[SCALE]).to(quantized.device).flatten(),
        "qmap": quantized.qmap,
    }
    return shard_like(type(quantized).__tensor_unflatten__(own, context), value)


def shard_like(local: Tensor, value: Tensor) -> Tensor:
    """Returns a sharded tensor with the shard `local` and the sharding of `value`. Returns `local` if `value` is not
    sharded. `local` may have another number of columns than the shard of `value`.
    """
    if not isinstance(value, DTensor):
        return local
    num_column_shards = value.shape[-1] // local_tensor(value).shape[-1]
    shape = torch.Size((*value.shape[:-1], local.shape[-1] * num_column_shards))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride)


def describe_module(model: nn.Module) -> str:
    """Returns the class of a module and its number of parameters."""
    return f"{type(model).__name__}, {sum(parameter.numel() for parameter in model.parameters()):,} parameters"


class ModuleEngine:
    """Implements the methods of `TrainEngine` that need only the weights and the optimizer of this process.

    The constructor of a subclass sets `model` and, for a trained role, `_steps`.
    """

    model: nn.Module
    """Module with the weights of this process, under the names of a checkpoint."""
    group: ProcessGroup | None = None
    """All ranks of the role. None for a single process."""
    _steps: OptimizerSteps | None = None

    @property
    def steps(self) -> OptimizerSteps:
        assert self._steps is not None, "only a trained role takes optimizer steps"
        return self._steps

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self._steps is None else self._steps.optimizer

    def optim_step(self) -> dict[str, Metric]:
        """Takes an optimizer step on the accumulated gradient. See `OptimizerSteps.take`."""
        return self.steps.take()

    def pop_usage(self) -> dict[str, float]:
        return {}

    @property
    def architecture(self) -> str:
        return describe_module(self.model)

    @property
    def has_optimizer_state(self) -> bool:
        return self.optimizer is not None and bool(self.optimizer.state)

    def save_state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        return module_state(self.model, self.optimizer if with_optimizer else None)

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None:
        load_module_state(self.model, self.optimizer, tensors)
        if self._steps is not None:
            self._steps.restore(counters)

    def counters(self) -> dict[str, float]:
        return {} if self._steps is None else self._steps.counters()

    def offload(self, *, keep_weights: bool = False) -> None:
        """Does nothing. An engine that reads the setting `offload` overrides this method."""

    def onload(self) -> None:
        """Does nothing. See `offload`."""
