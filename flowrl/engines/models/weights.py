"""Exports a model's weights as NumPy arrays for other processes, and loads such arrays into a model.

Names are the model's parameter and buffer names. A tied weight is exported once, under the first of its names. NumPy
has no bfloat16. A bfloat16 weight is therefore exported as an int16 view whose name ends in `BFLOAT16`. An 8-bit layer
receives the weight in its original dtype and quantizes it.
"""

import copy
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flowrl.data.dtypes import dtype_name
from flowrl.engines.models.adapters.lora import ModelWeight, adapter_layers, model_weights
from flowrl.engines.models.int8 import Int8Linear, int8_layers
from flowrl.engines.models.parameters import set_parameter
from flowrl.engines.models.routing import EXPERT_PARALLEL, experts_implementation

BFLOAT16 = "|bfloat16"
"""Suffix of the name of an int16 array that contains the bits of a bfloat16 weight."""


WeightShape = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a weight."""


class WeightsError(ValueError):
    """Raised if weights do not match the model that should load them."""


def weight_buckets(weights: Iterable[WeightShape], max_bytes: float) -> list[list[str]]:
    """Groups the names of weights into buckets of at most `max_bytes`. A weight larger than `max_bytes` gets its own
    bucket.
    """
    buckets: list[list[str]] = [[]]
    size = 0
    for name, dtype, shape in weights:
        num_bytes = math.prod(shape) * dtype.itemsize
        if buckets[-1] and size + num_bytes > max_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += num_bytes
    return buckets


def weight_shapes(
    model: nn.Module, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
) -> list[WeightShape]:
    """Returns name, dtype and shape of each weight that `full_weights` would yield. Does not communicate."""
    weights = unique_weights(model)
    chosen = weights if names is None else names
    return [(name, cast_dtype(weights[name].stored.dtype, dtype), tuple(weights[name].stored.shape)) for name in chosen]


def full_weights(
    model: nn.Module, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields full weights one at a time on the model's device. Adapters are merged.

    All ranks of a sharded model must iterate together.

    Args:
        model: sharded or unsharded model.
        names: names of the weights to yield. None means all weights.
        dtype: dtype to which floating-point weights are cast. None keeps their dtype.
    """
    weights = unique_weights(model)
    for name in weights if names is None else names:
        yield name, weights[name].gather(cast_dtype(weights[name].stored.dtype, dtype)).detach()


def export_weight_part(
    model: nn.Module, index: int, count: int, names: Sequence[str], dtype: torch.dtype | None = None
) -> Iterator[Tensor]:
    """Yields part `index` of `count` of each weight without communication. A part has the rows of `find_rows`.

    A weight without dimensions has shape [1] in part 0 and [0] in the other parts.

    Args:
        model: a model without adapters. If FSDP2 shards the model, this process must be rank `index` of the `count`
            ranks.
        index, count: part of each weight.
        names, dtype: see `full_weights`.
    """
    weights = unique_weights(model)
    for name in names:
        stored, cast = weights[name].stored, cast_dtype(weights[name].stored.dtype, dtype)
        if isinstance(stored, DTensor):
            own = stored.to_local()
        else:
            rows = stored if stored.ndim else stored[None]
            own = rows[slice(*find_rows(len(rows), index, count))]
        yield own.detach().to(cast)


def find_rows(num_rows: int, index: int, count: int) -> tuple[int, int]:
    """Returns the first row and the end (exclusive) of part `index` of `count`, as FSDP2 shards rows. A part has
    ceil(num_rows / count) rows. The last parts may have fewer rows or none.
    """
    size = -(-num_rows // count)
    return min(index * size, num_rows), min((index + 1) * size, num_rows)


def export_weights(
    model: nn.Module,
    names: Sequence[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    is_receiver: bool = True,
    snapshot: bool = True,
) -> dict[str, np.ndarray]:
    """Returns full weights as contiguous arrays on the CPU. All ranks of a sharded model must call this together.

    Args:
        model, names, dtype: see `full_weights`.
        is_receiver: True returns the weights on this rank. False takes part in the all-gathers and returns no weights.
        snapshot: True copies all weights. False lets unsharded weights on the CPU share the model's memory.
    """
    return to_arrays(full_weights(model, names, dtype), is_receiver=is_receiver, snapshot=snapshot)


def to_arrays(
    weights: Iterable[tuple[str, Tensor]], *, is_receiver: bool = True, snapshot: bool = True
) -> dict[str, np.ndarray]:
    """Returns full weights as contiguous arrays on the CPU. See `export_weights`."""
    arrays = {}
    for name, weight in weights:
        if is_receiver:
            array = weight.cpu().contiguous()
            is_view = array.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            bits = _bits(array.clone() if snapshot and is_view else array)
            arrays[name + BFLOAT16 if array.dtype == torch.bfloat16 else name] = bits.numpy()
    return arrays


def cast_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a weight is exported: `dtype` for a floating-point weight, unless it is None,
    otherwise `stored`.
    """
    return stored if dtype is None or not stored.is_floating_point else dtype


def meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model on the meta device, whose weights `gathered_weights` sets. The copy shares the buffers
    of the model.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    if config._experts_implementation == EXPERT_PARALLEL:  # the copy has the weights of all experts
        config._experts_implementation = experts_implementation(model.dtype)
    with torch.device("meta"):
        meta_model = type(model)(config)
    _share_buffers(meta_model, model)
    meta_model.generation_config = model.generation_config
    return meta_model.eval()


@contextmanager
def gathered_weights(meta_model: nn.Module, owner: nn.Module) -> Iterator[None]:
    """Inside the `with` block, sets the parameters of a `meta_copy` to the full, merged weights of `owner`.

    Unsharded weights are not copied. All ranks of a sharded model must enter the block together. There are no
    collectives inside the block. Peak memory is the full copy plus one weight.
    """
    _share_buffers(meta_model, owner)  # again, since moving the owner to another device replaces its buffers
    empty = dict(meta_model.named_parameters(remove_duplicate=False))
    for name, weight in unique_weights(owner).items():
        if name not in empty:
            continue  # a shared buffer
        full = nn.Parameter(weight.gather(), requires_grad=False)
        for tied_name in (other for other, parameter in empty.items() if parameter is empty[name]):
            set_parameter(meta_model, tied_name, full)
    try:
        yield
    finally:
        for name, parameter in empty.items():
            set_parameter(meta_model, name, parameter)


def _share_buffers(meta_model: nn.Module, owner: nn.Module) -> None:
    for name, buffer in owner.named_buffers():
        path, _, leaf = name.rpartition(".")
        meta_model.get_submodule(path)._buffers[leaf] = buffer


def to_tensors(weights: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Converts exported arrays to tensors under the model's names. The tensors share the memory of the arrays."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    return {
        name.removesuffix(BFLOAT16): tensor.view(torch.bfloat16) if name.endswith(BFLOAT16) else tensor
        for name, tensor in tensors.items()
    }


class WeightTargets:
    """The weights of a model by export name. They are collected once and used for all buckets of an update."""

    def __init__(self, model: nn.Module) -> None:
        """Raises WeightsError for a model with an adapter, because exported weights are merged."""
        if adapter_layers(model):
            raise WeightsError("merged weights do not fit a model with an adapter: use a model without adapter")
        self._model = model
        self._stored = {
            name + BFLOAT16 if weight.stored.dtype == torch.bfloat16 else name: weight.stored
            for name, weight in unique_weights(model).items()
        }

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def write(self, weights: Mapping[str, np.ndarray], *, strict: bool = False) -> None:
        """Copies exported weights into the model without conversion.

        Args:
            weights: arrays by export name. They may be read-only.
            strict: True requires all weights of the model.
        Raises WeightsError if a name is unknown, if a name is missing with `strict`, or if a shape or dtype differs. In
            these cases, the model is unchanged.
        """
        targets = self._stored if strict else {name: self._stored[name] for name in weights if name in self._stored}
        _check(targets, weights)
        with torch.no_grad():
            for name, target in targets.items():
                if target.is_meta:
                    _quantize(self._model, *next(iter(to_tensors({name: weights[name]}).items())))
                else:
                    _write(_bits(target.detach()), weights[name])


def load_weights(model: nn.Module, weights: Mapping[str, np.ndarray], *, strict: bool = True) -> None:
    """Copies exported weights into a model. For the arguments and errors, see `WeightTargets.write`."""
    WeightTargets(model).write(weights, strict=strict)


def write_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies weights into a model one at a time. Raises WeightsError if a name or shape does not match."""
    targets = {name: weight.stored for name, weight in unique_weights(model).items()}
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
    assert isinstance(layer, Int8Linear), "only 8-bit layers have a target on the meta device"
    layer.load_weight(weight)


def unique_weights(model: nn.Module) -> dict[str, ModelWeight]:
    """Returns each weight once, under the first of its names. For an 8-bit layer, the value is a meta tensor with the
    original shape and dtype.
    """
    named: dict[str, ModelWeight] = {}
    seen: set[int] = set()
    quantized = int8_layers(model)
    for name, weight in model_weights(model).items():
        owner, _, leaf = name.rpartition(".")
        if owner in quantized and leaf == "scale":
            continue
        if owner in quantized and leaf == "weight":
            weight = ModelWeight(quantized[owner].original, None)
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
        raise WeightsError(
            f"{len(missing)} weights are missing and {len(unknown)} are unknown, such as "
            f"{', '.join((missing + unknown)[:3])}; export them from a model of the same configuration and dtype"
        )
    for name, target in targets.items():
        array, expected = weights[name], _bits(target)
        same_type = array.dtype == np.dtype(dtype_name(expected.dtype))
        if array.shape != tuple(expected.shape) or not same_type:
            raise WeightsError(
                f"weight {name} is {array.dtype} {list(array.shape)}, but the model has "
                f"{expected.dtype} {list(expected.shape)}; export it from a model of the same configuration"
            )


def _write(target: Tensor, array: np.ndarray) -> None:
    if target.device.type == "cpu":
        # NumPy copies from read-only arrays; torch would warn and need another copy.
        np.copyto(target.numpy(), array)
    else:
        target.copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))
