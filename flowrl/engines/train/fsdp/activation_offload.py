"""Keeps the inputs of checkpointed layers in host memory from the forward pass to the backward pass of their layer.

Gradient checkpointing saves the input of each layer, and computes the layer again in the backward pass. The inputs
leave the device while the next layers run, and return one layer before they are needed.
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
"""Size in bytes from which a tensor is moved. A smaller one is not worth the overhead of two copies."""


class _SavedInput:
    """The saved input of a layer, on the device or in host memory. It refers to that of the layer before."""

    def __init__(self, kept: Tensor | None, moved: OffloadedTensor | None, next_: "_SavedInput | None") -> None:
        self._kept, self.moved = kept, moved
        # The graph of the pass holds the inputs. It frees those of a layer after its backward pass.
        self._next = None if next_ is None else weakref.ref(next_)

    def restore(self) -> Tensor:
        tensor = self._kept if self.moved is None else self.moved.restore()
        assert tensor is not None, "an input is on the device or in host memory"
        next_ = None if self._next is None else self._next()
        if next_ is not None and next_.moved is not None:
            next_.moved.prefetch()
        return tensor


class _InputOffload:
    """Runs layers whose checkpoints save their inputs in host memory."""

    def __init__(self, model: PreTrainedModel, device: Device) -> None:
        self._model, self._device = model, device
        self._last: weakref.ref[_SavedInput] | None = None
        """The input that this pass has moved last."""
        self._weights: frozenset[int] = frozenset()
        """Addresses of the weights, as of the first layer of the pass."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_InputOffload":
        return self  # a rollout copies the modules of the model, and trains no copy

    def run(
        self, checkpoint: Callable[..., Any], is_first: bool, is_last: bool, layer: Callable[..., Any], *inputs: Any
    ) -> Any:  # Any: the inputs and outputs of a layer
        """Calls `checkpoint(layer, *inputs)`. Outside of the layer, it saves only the inputs, to which the hooks apply.

        The input of the last layer stays on the device, because its backward pass is the first.
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
        """Returns whether a copy in host memory frees device memory: the tensor is on the device, has at least
        `MIN_BYTES`, and is neither a weight nor a view of a larger tensor.
        """
        if isinstance(tensor, DTensor) or tensor.nbytes < MIN_BYTES or tensor.is_cpu == self._device.has_own_memory:
            return False
        return tensor.untyped_storage().nbytes() == tensor.nbytes and _address(tensor) not in self._weights


def offload_inputs(model: PreTrainedModel, layers: Sequence[nn.Module], device: Device) -> None:
    """Moves the inputs that checkpointed layers save to host memory, except that of the last layer.

    Args:
        model: a model with gradient checkpointing.
        layers: its layers, in the order of the forward pass.
        device: device of the model.
    Raises EngineError if the model, not its layers, saves the inputs.
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
