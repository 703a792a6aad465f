"""Keeps the input of each checkpointed layer in host memory between the layer's forward and backward pass.

Gradient checkpointing saves the input of each layer, and computes the layer again in the backward pass. An input leaves
the device while the next layers run, and returns during the backward pass of the layer that follows.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from flowrl.devices.device import Device, OffloadedTensor, local_tensor
from flowrl.engines.parallel.sharding import EngineError

MIN_BYTES = 2**20
"""Minimum size in bytes of a tensor that is moved. A smaller tensor is not worth the overhead of two copies."""


class _SavedInput:
    """The saved input of a layer, on the device or in host memory. Its `restore` prefetches the input of the layer
    before.
    """

    def __init__(self, kept: Tensor | None, moved: OffloadedTensor | None, next_: "_SavedInput | None") -> None:
        self._kept, self.moved = kept, moved
        # A weak reference, because the autograd graph owns the saved inputs, and frees each after its backward pass.
        self._next = None if next_ is None else weakref.ref(next_)

    def restore(self) -> Tensor:
        tensor = self._kept if self.moved is None else self.moved.restore()
        assert tensor is not None, "an input is on the device or in host memory"
        next_ = None if self._next is None else self._next()
        if next_ is not None and next_.moved is not None:
            next_.moved.prefetch()
        return tensor


class _InputOffload:
    """Runs checkpointed layers, and moves the inputs that they save to host memory."""

    def __init__(self, model: PreTrainedModel, device: Device) -> None:
        self._model, self._device = model, device
        self._last: weakref.ref[_SavedInput] | None = None
        """The last input that this forward pass has moved. None before the first move."""
        self._weights: frozenset[int] = frozenset()
        """Storage addresses of the weights at the first layer of the pass. Weights are not moved."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_InputOffload":
        return self  # a rollout copies the modules of the model, but does not train the copy

    def run(
        self, checkpoint: Callable[..., Any], is_first: bool, is_last: bool, layer: Callable[..., Any], *inputs: Any
    ) -> Any:  # Any: the inputs and outputs of a layer
        """Calls `checkpoint(layer, *inputs)` with hooks on saved tensors. Outside of the layer, only the inputs are
        saved.

        The input of the last layer stays on the device, because the backward pass starts with this layer.
        """
        if is_first:
            self._last = None
            self._weights = frozenset(_address(weight) for weight in self._model.parameters())
        before = None if self._last is None else self._last()
        with saved_tensors_hooks(partial(self._save, is_last, before), lambda saved: saved.restore()):
            return checkpoint(layer, *inputs)

    def _save(self, is_last: bool, before: _SavedInput | None, tensor: Tensor) -> _SavedInput:
        if is_last or not self._can_move(tensor):
            return _SavedInput(tensor, None, before)
        saved = _SavedInput(None, self._device.offload(tensor), before)
        self._last = weakref.ref(saved)
        return saved

    def _can_move(self, tensor: Tensor) -> bool:
        """Returns whether a copy in host memory frees device memory. The tensor must be on the device, have at least
        `MIN_BYTES`, and be neither a weight nor a view of a larger tensor.
        """
        if isinstance(tensor, DTensor) or tensor.nbytes < MIN_BYTES or tensor.is_cpu == self._device.has_own_memory:
            return False
        return tensor.untyped_storage().nbytes() == tensor.nbytes and _address(tensor) not in self._weights


def offload_inputs(model: PreTrainedModel, layers: Sequence[nn.Module], device: Device) -> None:
    """Makes checkpointed layers save their inputs in host memory, except for the last layer.

    Args:
        model: a model with gradient checkpointing.
        layers: layers of the model, in the order of the forward pass.
        device: device of the model.
    Raises EngineError if the layers do not support gradient checkpointing per layer.
    """
    if not layers or not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise EngineError(
            f"engine.offload_activations is true, but the layers of {type(model).__name__} do not support gradient "
            f"checkpointing per layer: remove engine.offload_activations"
        )
    offload = _InputOffload(model, device)
    for layer in layers:
        checkpointed: Any = layer  # transformers has set the attribute with gradient checkpointing
        checkpoint = checkpointed._gradient_checkpointing_func
        is_first, is_last = layer is layers[0], layer is layers[-1]
        checkpointed._gradient_checkpointing_func = partial(offload.run, checkpoint, is_first, is_last)


def _address(tensor: Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()
