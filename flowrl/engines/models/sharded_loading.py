"""Loads sharded models without a full copy on any rank.

A model is created on the meta device, where weights take no memory, and is then sharded. Each rank allocates only its
shards and reads them from the safetensors files. If the files store each expert as a separate matrix, a rank reads only
the matrices in its shard.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from flowrl.config.source import read_json
from flowrl.engines.models.adapters.lora import ModelWeight, adapter_layers, base_quantization, model_weights
from flowrl.engines.models.adapters.quantized_base import QuantizedLinear
from flowrl.engines.models.adapters.saved_adapter import LayerChange, SavedAdapter
from flowrl.engines.models.attention import find_attention
from flowrl.engines.models.file_layout import FilePart, file_parts
from flowrl.engines.models.parameters import check_finite, replace_parameter, set_parameter, unique_parameters
from flowrl.engines.models.partial_loading import InitialWeights
from flowrl.engines.models.weights import cast_dtype, unique_weights

Model = TypeVar("Model", bound=nn.Module)

_OPTIONAL: Mapping[str, Any] = {"_raise_exceptions_for_missing_entries": False}


@dataclass(frozen=True)
class _FileEntry:
    """File, name and shape of a weight on disk."""

    file: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _PartsEntry:
    """A weight [E, R, C] whose experts are separate file entries. `parts` is sorted by file."""

    parts: tuple[tuple[FilePart, _FileEntry], ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _InitialEntry:
    """A weight that the files lack. `weights` draws its initial value."""

    weights: InitialWeights
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _AdaptedEntry:
    """A weight to which the change of an adapter is added."""

    base: _FileEntry | _PartsEntry | _InitialEntry
    change: LayerChange

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape


_Entry = _FileEntry | _PartsEntry | _InitialEntry | _AdaptedEntry

_pending: WeakKeyDictionary[nn.Module, dict[str, _Entry]] = WeakKeyDictionary()
"""For each model on the meta device, maps weight names (without adapter suffixes) to the sources of their values."""


def make_meta_model(
    auto: Any,  # Any: transformers' Auto classes share no typed base
    path: Path,
    dtype: torch.dtype,
    fresh: frozenset[str] = frozenset(),
    missing: Sequence[str] = (),
    adapter: SavedAdapter | None = None,
    **settings: Any,  # Any: of a configuration
) -> PreTrainedModel | None:
    """Creates a model whose weights stay on the meta device until `load_shards` reads them.

    Args:
        auto: one of transformers' Auto classes.
        path: a folder with safetensors, or a Hub name.
        dtype: dtype of the weights.
        fresh: names of weights that are set to zero instead of read from the files.
        missing: names of further weights that the files lack. They get the initial values of a new model.
        adapter: an adapter that is merged into the weights.
        settings: overrides of the model configuration.
    Returns: the model, or None if the files lack a weight that is in neither `fresh` nor `missing`, or have another
    shape.
    Raises OSError, ValueError or SafetensorError if the model does not exist or its files are corrupt.
    """
    local = path.is_dir()
    entries = _file_entries(path, local)
    config = AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=local, **settings)
    with torch.device("meta"):
        model = auto.from_config(
            config, dtype=dtype, attn_implementation=find_attention(auto, config), trust_remote_code=False
        )
    pending: dict[str, _Entry] = {}
    initial = InitialWeights(model) if missing else None
    changes = {} if adapter is None else adapter.changes(model)
    find = _EntryFinder(model, entries)
    _set_known(model, fresh, {} if adapter is None else adapter.weights(model))
    for names, weight in unique_parameters(model):
        if not weight.is_meta:
            continue
        entry: _FileEntry | _PartsEntry | _InitialEntry | None
        if initial is not None and names[0] in missing:
            entry = _InitialEntry(initial, names[0], tuple(weight.shape))
        else:
            entry = find(names, tuple(weight.shape))
        if entry is None:
            return None
        change = next((changes[name] for name in names if name in changes), None)
        pending[names[0]] = entry if change is None else _AdaptedEntry(entry, change)
    _initialize_buffers(model)
    for name in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        entry = find([name], tuple(model.get_buffer(name).shape))
        if isinstance(entry, _FileEntry):
            _read_buffer(model, name, entry, dtype)
        elif name not in missing:
            return None
    _pending[model] = pending
    if model.can_generate() and cached_file(str(path), "generation_config.json", **_OPTIONAL, local_files_only=local):
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=local)
    return model


def _set_known(model: PreTrainedModel, fresh: frozenset[str], complete: Mapping[str, Tensor]) -> None:
    """Sets fresh weights to zero, and the weights in `complete` to the given values. Tied weights are set under all
    names.
    """
    for names, weight in unique_parameters(model):
        value = next((complete[name] for name in names if name in complete), None)
        if not fresh.isdisjoint(names):
            replace_parameter(model, names[0], torch.zeros(weight.shape, dtype=weight.dtype))
        elif value is not None:
            replace_parameter(model, names[0], value.to(weight.dtype, copy=True))


def move_loaded(model: Model, device: torch.device) -> Model:
    """Moves all tensors to a device, except tensors on the meta device.

    Also copies tensors that are already on the device, because a loaded tensor may be memory-mapped. If its file were
    then rewritten in place, the weights would change, or the process would end with SIGBUS.
    """
    return model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device, copy=True))


def load_shards(model: nn.Module, device: torch.device) -> None:
    """Allocates this rank's shards of all weights on the meta device, and reads the shards from the model's files. The
    weights of `QuantizedLinear` stay on the meta device.
    """
    quantized = {id(module.weight) for module in model.modules() if isinstance(module, QuantizedLinear)}
    tied_names = [names for names, weight in unique_parameters(model) if weight.is_meta and id(weight) not in quantized]
    if not tied_names:
        return

    def allocate(tensor: Tensor) -> Tensor:
        is_kept = not tensor.is_meta or id(tensor) in quantized
        return tensor if is_kept else torch.empty_like(tensor, device=device)

    # `_apply`, because FSDP2 and other modules override it to register their new weights.
    model._apply(allocate)
    for first, *others in tied_names:
        for name in others:
            set_parameter(model, name, model.get_parameter(first))
    for language_model in [module for module in model.modules() if module in _pending]:
        weights = model_weights(language_model)
        for name, entry in _pending.pop(language_model).items():
            if name in weights:  # a pipeline stage lacks the weights of other stages
                with torch.no_grad():
                    _read(weights[name].stored, entry)


def quantize_base(model: PreTrainedModel, device: torch.device) -> None:
    """Quantizes the base layers of an adapter on a device, if the adapter's settings require it. Reads weights on the
    meta device from the model's files, one at a time.
    """
    pending = _pending.get(model, {})
    for path, layer in adapter_layers(model).items():
        quantization, base = base_quantization(layer), layer.base_layer
        if quantization is None:
            continue
        assert isinstance(base, nn.Linear | Conv1D), "adapters have linear base layers"
        full = base.weight.detach()
        if full.is_meta:
            full = torch.empty_like(full, device="cpu")
            _read(full, pending.pop(f"{path}.weight"))
        layer.base_layer = QuantizedLinear(base, full.to(device), quantization)


def stream_full_weights(
    model: nn.Module,
    names: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the full weights of a model that was loaded with `on_meta`, one at a time. The model is not changed.

    Adapters are merged, as in `full_weights`. Weights from the files are merged on `device`, or on the CPU if `device`
    is None. For `names` and `dtype`, see `full_weights`.
    """
    sources = {
        f"{path}.{name}" if path else name: entry
        for path, module in model.named_modules()
        for name, entry in _pending.get(module, {}).items()
    }
    weights = unique_weights(model)
    for name in weights if names is None else names:
        weight = weights[name]
        if weight.stored.is_meta:
            full = torch.empty_like(weight.stored, device="cpu", requires_grad=False)
            _read(full, sources[name])
            weight = ModelWeight(full.to(device), weight.adapter)
        yield name, weight.gather(cast_dtype(weight.stored.dtype, dtype)).detach()


def _read(weight: Tensor, entry: _Entry) -> None:
    shape, offset, local = entry.shape, (0,) * weight.ndim, weight
    if isinstance(weight, DTensor):
        local = weight.to_local()
        shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    if not local.numel():
        return
    slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    change = entry.change if isinstance(entry, _AdaptedEntry) else None
    entry = entry.base if isinstance(entry, _AdaptedEntry) else entry
    if isinstance(entry, _InitialEntry):
        local.copy_(entry.weights.draw(entry.name)[slices])
    elif isinstance(entry, _PartsEntry):
        _read_parts(local, slices, entry)
    else:
        with safe_open(entry.file, framework="pt") as file:
            local.copy_(file.get_slice(entry.name)[slices] if slices else file.get_tensor(entry.name))
        check_finite(local, entry.name, entry.file)
    if change is not None:
        local.copy_(change.merge(local, slices))


def _read_parts(local_erc: Tensor, slices: Sequence[slice], entry: _PartsEntry) -> None:
    """Reads the parts of a weight [E, R, C] that overlap this rank's shard. `slices` is the position of the shard in
    the weight.
    """
    own_e, own_r, own_c = slices
    for path, parts in groupby(entry.parts, key=lambda pair: pair[1].file):
        with safe_open(path, framework="pt") as file:
            for part, stored in parts:
                assert part.expert is not None, "a complete weight has a file entry of its own"
                start, stop = max(part.first_row, own_r.start), min(part.first_row + part.shape[0], own_r.stop)
                if start < stop and own_e.start <= part.expert < own_e.stop:
                    target_rc = local_erc[part.expert - own_e.start, start - own_r.start : stop - own_r.start]
                    rows = slice(start - part.first_row, stop - part.first_row)
                    target_rc.copy_(file.get_slice(stored.name)[rows, own_c])
                    check_finite(target_rc, stored.name, path)


def _read_buffer(model: PreTrainedModel, name: str, entry: _FileEntry, dtype: torch.dtype) -> None:
    """Reads a full persistent buffer, because buffers are not sharded. Like transformers, keeps some buffers in
    float32.
    """
    keeps_float32 = any(re.search(pattern, name) for pattern in model._keep_in_fp32_modules_strict or ())
    with safe_open(entry.file, framework="pt") as file:
        value = file.get_tensor(entry.name)
    if value.is_floating_point():
        check_finite(value, entry.name, entry.file)
        value = value.to(torch.float32 if keeps_float32 and dtype.itemsize == 2 else dtype)
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._buffers[leaf] = value.clone()  # not mapped from the file, as in `move_loaded`


def read_weights(path: Path, names: Sequence[str]) -> dict[str, tuple[Tensor, str]]:
    """Returns name -> (weight, path of its file) for each of `names` that is in the files of a model."""
    entries, weights = _file_entries(path, path.is_dir()), {}
    for entry in (entries[name] for name in names if name in entries):
        with safe_open(entry.file, framework="pt") as file:
            weights[entry.name] = file.get_tensor(entry.name), entry.file
        check_finite(weights[entry.name][0], entry.name, entry.file)
    return weights


def _file_entries(path: Path, local: bool) -> dict[str, _FileEntry]:
    index = cached_file(str(path), SAFE_WEIGHTS_INDEX_NAME, **_OPTIONAL, local_files_only=local)
    names = {SAFE_WEIGHTS_NAME} if index is None else set(read_json(Path(index))["weight_map"].values())
    entries = {}
    for name in sorted(names):
        file = cached_file(str(path), name, local_files_only=local)
        assert file is not None, "cached_file raises for a missing file"
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (a file, not a dictionary)
                entries[key] = _FileEntry(file, key, tuple(opened.get_slice(key).get_shape()))
    return entries


class _EntryFinder:
    """Finds weights of a model in its files."""

    def __init__(self, model: PreTrainedModel, entries: Mapping[str, _FileEntry]) -> None:
        self._model, self._entries = model, entries

    def __call__(self, names: Sequence[str], shape: tuple[int, ...]) -> _FileEntry | _PartsEntry | None:
        """Returns the file entry of a weight with these names. Returns None if the files lack the weight, or if its
        shape differs.
        """
        if (entry := self._find_name(names)) is not None:
            return entry if entry.shape == shape else None
        parts = self._parts.get(names[0], ())
        pairs = [(part, entry) for part in parts if (entry := self._find_name([part.name])) is not None]
        if not parts or len(pairs) < len(parts) or any(part.shape != entry.shape for part, entry in pairs):
            return None
        if parts[0].expert is None:
            return pairs[0][1]
        return _PartsEntry(tuple(sorted(pairs, key=lambda pair: pair[1].file)), shape)

    def _find_name(self, names: Sequence[str]) -> _FileEntry | None:
        """Returns the entry with one of these names, with or without the prefix of the backbone."""
        prefix = f"{self._model.base_model_prefix}."
        spellings = (spelling for name in names for spelling in (name, name.removeprefix(prefix), prefix + name))
        return next((self._entries[name] for name in spellings if name in self._entries), None)

    @cached_property
    def _parts(self) -> dict[str, tuple[FilePart, ...]]:
        return file_parts(self._model)


def _initialize_buffers(model: PreTrainedModel) -> None:
    """Computes buffers that are not saved, such as rotary frequencies, with transformers' own initialization."""
    owners = {name.rpartition(".")[0] for name, buffer in model.named_buffers() if buffer.is_meta}
    for owner in map(model.get_submodule, sorted(owners)):
        for leaf, buffer in owner.named_buffers(recurse=False):
            owner._buffers[leaf] = torch.zeros_like(buffer, device="cpu")
        model._init_weights(owner)
