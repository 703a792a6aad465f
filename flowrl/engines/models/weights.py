"""A model's weights as NumPy arrays, which every process can be handed, and back into a model.

Names are those of the model's parameters and saved buffers; a weight that has two (a tied output layer) appears once.
bfloat16 has no NumPy type: such an array is an int16 view and its name ends in `BFLOAT16`. A layer that is quantised
takes the weight that it had before, and keeps what it makes of it.
"""

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowrl.engines.models.int8 import Int8Linear, int8_layers
from flowrl.engines.models.lora import ModelWeight, adapter_layers, model_weights

BFLOAT16 = "|bfloat16"
"""Ending of the name of an array that holds bfloat16 bits as int16."""


class WeightsError(ValueError):
    """Weights do not fit the model they should be loaded into."""


def weight_chunks(model: nn.Module, max_bytes: float, dtype: torch.dtype | None = None) -> list[list[str]]:
    """The names of all weights in the model's order, each once, cut into parts of at most so many bytes.

    A weight that is larger is a part by itself. `dtype` is the type that floating-point weights are cast to.
    """
    chunks: list[list[str]] = [[]]
    size = 0
    for name, weight in _each_once(model).items():
        num_bytes = weight.stored.numel() * _cast_to(weight, dtype).itemsize
        if chunks[-1] and size + num_bytes > max_bytes:
            chunks.append([])
            size = 0
        chunks[-1].append(name)
        size += num_bytes
    return chunks


def weight_shapes(
    model: nn.Module, names: Sequence[str], dtype: torch.dtype | None = None
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, type and shape of whole weights as `whole_weights` gives them, without putting one together."""
    weights = _each_once(model)
    return [(name, _cast_to(weights[name], dtype), tuple(weights[name].stored.shape)) for name in names]


def whole_weights(
    model: nn.Module, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Weights of these names, one whole after another, where the model is; without a copy where that can be.

    A model with an adapter gives what it computes with, under the names it has without. Floating-point weights are cast
    to `dtype`, by each rank its part, before they are put together. All ranks that hold parts of the model iterate.
    """
    weights = _each_once(model)
    for name in weights if names is None else names:
        yield name, weights[name].whole(_cast_to(weights[name], dtype)).detach()


def export_weights(
    model: nn.Module,
    names: Sequence[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    wanted: bool = True,
    snapshot: bool = True,
) -> dict[str, np.ndarray]:
    """Weights on the CPU, contiguous; arguments as of `whole_weights`.

    Args:
        wanted: ranks that do not want the arrays help with them and get nothing.
        snapshot: they are copies, which training on does not change; without it, those that can be are the weights
            themselves.
    """
    found = {}
    for name, weight in whole_weights(model, names, dtype):
        if wanted:
            array = weight.cpu().contiguous()
            is_own = array.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            bits = _bits(array.clone() if snapshot and is_own else array)
            found[name + BFLOAT16 if array.dtype == torch.bfloat16 else name] = bits.numpy()
    return found


def _cast_to(weight: ModelWeight, dtype: torch.dtype | None) -> torch.dtype:
    return weight.stored.dtype if dtype is None or not weight.stored.is_floating_point() else dtype


def empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without weights, for `borrowed_weights`; whatever changes how the other runs does not reach it."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        found = type(model)(config)
    _share_buffers(found, model)
    found.generation_config = model.generation_config
    return found.eval()


@contextmanager
def borrowed_weights(borrower: nn.Module, lender: nn.Module) -> Iterator[None]:
    """Fills an empty copy with the whole weights of a model that ranks hold in parts, or that has an adapter, for the
    length of the block.

    All ranks of the lender enter it together; in the block each is on its own. One weight after another is put
    together, so that beside the copy there is never more than one. Weights that are whole are not copied.
    """
    _share_buffers(borrower, lender)  # anew, since moving the lender to another device replaced its own
    places = dict(borrower.named_parameters(remove_duplicate=False))
    for name, weight in _each_once(lender).items():
        if name not in places:
            continue  # a buffer, which the copy shares
        whole = nn.Parameter(weight.whole(), requires_grad=False)
        for place, empty in places.items():
            if empty is places[name]:
                _put(borrower, place, whole)
    try:
        yield
    finally:
        for name, empty in places.items():
            _put(borrower, name, empty)


def _share_buffers(borrower: nn.Module, lender: nn.Module) -> None:
    for name, buffer in lender.named_buffers():
        owner, _, leaf = name.rpartition(".")
        borrower.get_submodule(owner)._buffers[leaf] = buffer


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter


def tensors_of(weights: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Exported weights as tensors on the same memory, which may be read-only, under the model's own names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    return {
        name.removesuffix(BFLOAT16): tensor.view(torch.bfloat16) if name.endswith(BFLOAT16) else tensor
        for name, tensor in tensors.items()
    }


class WeightTargets:
    """Where a model's weights are, looked up once for all parts of an update."""

    def __init__(self, model: nn.Module) -> None:
        """Raises WeightsError for a model with an adapter, which would be added to the one that is in the weights."""
        if adapter_layers(model):
            raise WeightsError(
                "the model has an adapter, which would be added to weights that have one: load them into one without"
            )
        self._model = model
        self._stored = {name: weight.stored for name, weight in _weights(model).items()}

    @property
    def names(self) -> Collection[str]:
        """Those under which they are exported."""
        return self._stored.keys()

    def write(self, weights: Mapping[str, np.ndarray], *, whole: bool = False) -> None:
        """Writes exported weights into the model, in place and bit for bit. Read-only arrays are welcome.

        Args:
            whole: all of them must be there, and not some.
        Raises:
            WeightsError: a name is missing or unknown, or an array has another shape or type than the model's weight.
                The model is then unchanged.
        """
        targets = self._stored if whole else {name: self._stored[name] for name in weights if name in self._stored}
        _check(targets, weights)
        with torch.no_grad():
            for name, target in targets.items():
                if target.is_meta:
                    _quantize(self._model, *next(iter(tensors_of({name: weights[name]}).items())))
                else:
                    _write(_bits(target.detach()), weights[name])


def load_weights(model: nn.Module, weights: Mapping[str, np.ndarray], *, whole: bool = True) -> None:
    """Writes exported weights into a model; arguments and errors as of `WeightTargets`."""
    WeightTargets(model).write(weights, whole=whole)


def write_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes weights of a model of the same configuration into one that may be quantised, one after another.

    Raises:
        WeightsError: the model has no such weight, or another shape of it; those before it are written.
    """
    targets = {name: weight.stored for name, weight in _each_once(model).items()}
    with torch.no_grad():
        for name, weight in weights:
            if name not in targets or targets[name].shape != weight.shape:
                raise WeightsError(f"the model has no weight {name} of shape {list(weight.shape)}")
            if targets[name].is_meta:
                _quantize(model, name, weight)
            else:
                targets[name].copy_(weight)


def _quantize(model: nn.Module, name: str, weight: Tensor) -> None:
    layer = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(layer, Int8Linear), "no other keeps something else than its weight"
    layer.take(weight)


def _weights(model: nn.Module) -> dict[str, ModelWeight]:
    """Every weight once, under the name it has in an export."""
    return {
        name + BFLOAT16 if weight.stored.dtype == torch.bfloat16 else name: weight
        for name, weight in _each_once(model).items()
    }


def _each_once(model: nn.Module) -> dict[str, ModelWeight]:
    """Every weight under the first of its names. That of a quantised layer is on `meta`: what is there is not it."""
    named: dict[str, ModelWeight] = {}
    seen: set[int] = set()
    quantized = int8_layers(model)
    for name, weight in model_weights(model).items():
        owner, _, leaf = name.rpartition(".")
        if owner in quantized and leaf == "scale":
            continue
        if owner in quantized and leaf == "weight":
            weight = ModelWeight(quantized[owner].replaced, None)
        if id(weight.stored) not in seen:
            seen.add(id(weight.stored))
            named[name] = weight
    return named


def _bits(weight: Tensor) -> Tensor:
    return weight.detach().view(torch.int16) if weight.dtype == torch.bfloat16 else weight


def _check(targets: Mapping[str, Tensor], weights: Mapping[str, np.ndarray]) -> None:
    missing = [name for name in targets if name not in weights]
    unknown = [name for name in weights if name not in targets]
    if missing or unknown:
        lack = [f"lack {', '.join(missing[:3])}"] if missing else []
        extra = [f"have also {', '.join(unknown[:3])}"] if unknown else []
        raise WeightsError(
            f"the weights {' and '.join(lack + extra)} ({len(missing)} missing, {len(unknown)} unknown); "
            f"export them from a model of the same configuration and dtype"
        )
    for name, target in targets.items():
        array, expected = weights[name], _bits(target)
        same_type = array.dtype == np.dtype(str(expected.dtype).removeprefix("torch."))
        if array.shape != tuple(expected.shape) or not same_type:
            raise WeightsError(
                f"weight {name} is {array.dtype} {list(array.shape)}, but the model has "
                f"{expected.dtype} {list(expected.shape)}; export it from a model of the same configuration"
            )


def _write(target: Tensor, array: np.ndarray) -> None:
    if target.device.type == "cpu":
        # Through NumPy: torch warns about read-only arrays, and would need a copy of them first.
        np.copyto(target.numpy(), array)
    else:
        target.copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))
