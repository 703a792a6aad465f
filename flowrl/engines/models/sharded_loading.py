"""Models that ranks hold in parts, from disk without a rank that ever holds the whole.

A model is made with its weights on `meta`, where they take no memory; it is cut; then each rank makes room for its
parts and reads them out of the safetensors files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from flowrl.engines.models.lora import model_weights
from flowrl.engines.models.offload import named_weights


@dataclass(frozen=True)
class _Stored:
    """A weight in a file."""

    file: str
    name: str
    shape: tuple[int, ...]


_stored: WeakKeyDictionary[nn.Module, Mapping[str, _Stored]] = WeakKeyDictionary()
"""Model whose weights are yet to be read -> where each is, by its name in the model without an adapter."""


def empty_model(
    auto: Any,  # Any: transformers' Auto classes share no typed base
    path: Path,
    dtype: torch.dtype,
    fresh: frozenset[str] = frozenset(),
    **settings: Any,  # Any: of a configuration
) -> PreTrainedModel | None:
    """A model with its buffers, and weights on `meta` that `read_parts` reads.

    None where the files lack a weight, or have it under another name or in another shape: transformers may know how to
    make one of the other, or what is wrong with it.

    Args:
        auto: one of transformers' Auto classes.
        path: a folder with safetensors, or a hub name.
        dtype: of the weights.
        fresh: weights that are not in the files: made here, with nothing in them.
        settings: put over the configuration's.
    Raises: OSError, ValueError, SafetensorError: there is no such model, or its files are damaged.
    """
    local = path.is_dir()
    found = _weights_of(path, local)
    config = AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=local, **settings)
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
    if model.state_dict().keys() != dict(model.named_parameters(remove_duplicate=False)).keys():
        # Buffers that are saved; no family of docs/models.md has them.
        return None
    stored = {}
    for names, weight in named_weights(model):
        if not fresh.isdisjoint(names):
            _replace(model, names, nn.Parameter(torch.zeros(weight.shape, dtype=weight.dtype)))
            continue
        match = next((found[name] for name in _aliases(model, names) if name in found), None)
        if match is None or match.shape != tuple(weight.shape):
            return None
        stored[names[0]] = match
    _make_buffers(model)
    _stored[model] = stored
    if model.can_generate() and cached_file(str(path), "generation_config.json", **_OPTIONAL, local_files_only=local):
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=local)
    return model


_OPTIONAL: Mapping[str, Any] = {"_raise_exceptions_for_missing_entries": False}


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Moves what is there to a device; weights on `meta` stay."""
    return model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def read_parts(model: nn.Module, device: torch.device) -> None:
    """Gives this rank its parts of all weights that are on `meta`; does nothing where there are none."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    names = [names for names, weight in named_weights(model) if weight.is_meta]
    # Layers are told of their new weights by their own `_apply`.
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for first, *others in names:
        _replace(model, others, model.get_parameter(first))
    for language_model in [module for module in model.modules() if module in _stored]:
        weights = model_weights(language_model)
        for name, stored in _stored.pop(language_model).items():
            with torch.no_grad():
                _read(weights[name].stored, stored)


def read_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model that was loaded with `parts`, whole, one after another; the model stays as it is."""
    stored = _stored.get(model)
    for names, weight in named_weights(model):
        if stored is None:
            yield names[0], weight
        else:
            read = torch.empty_like(weight, device="cpu", requires_grad=False)
            _read(read, stored[names[0]])
            yield names[0], read


def _read(weight: Tensor, stored: _Stored) -> None:
    """Fills a weight, or this rank's part of it. A file is open for one weight only: its pages count as memory."""
    shape, offset, own = stored.shape, (0,) * weight.ndim, weight
    if isinstance(weight, DTensor):
        own = weight.to_local()
        shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    if own.numel():
        with safe_open(stored.file, framework="pt") as file:
            where = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            own.copy_(file.get_slice(stored.name)[where] if where else file.get_tensor(stored.name))


def _weights_of(path: Path, local: bool) -> dict[str, _Stored]:
    """Every weight of a folder or a hub name."""
    index = cached_file(str(path), SAFE_WEIGHTS_INDEX_NAME, **_OPTIONAL, local_files_only=local)
    names = {SAFE_WEIGHTS_NAME} if index is None else set(json.loads(Path(index).read_text())["weight_map"].values())
    found = {}
    for name in sorted(names):
        file = cached_file(str(path), name, local_files_only=local)
        assert file is not None, "a file that is not there was raised for"
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (a file, not a dictionary)
                found[key] = _Stored(file, key, tuple(opened.get_slice(key).get_shape()))
    return found


def _aliases(model: PreTrainedModel, names: list[str]) -> Iterator[str]:
    """What a weight may be called in a file: a backbone's weights have a prefix in a whole model, and none alone."""
    prefix = f"{model.base_model_prefix}."
    for name in names:
        yield from (name, name.removeprefix(prefix), prefix + name)


def _replace(model: nn.Module, names: list[str], weight: nn.Parameter) -> None:
    for name in names:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = weight


def _make_buffers(model: PreTrainedModel) -> None:
    """Buffers that no file has, such as rotary frequencies, by transformers' own code."""
    owners = {name.rpartition(".")[0] for name, buffer in model.named_buffers() if buffer.is_meta}
    for owner in map(model.get_submodule, sorted(owners)):
        for leaf, buffer in owner.named_buffers(recurse=False):
            owner._buffers[leaf] = torch.zeros_like(buffer, device="cpu")
        model._init_weights(owner)
