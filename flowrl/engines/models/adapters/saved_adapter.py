"""LoRA adapters in files: changes of a model's weights, in the format of peft.

A role merges them into the weights that it loads (`model.adapter`), or trains them further (`lora`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flowrl.config import ADAPTER_SETTINGS
from flowrl.config.source import read_json
from flowrl.engines.models.adapters.lora import SAVED_PREFIX, LoraError, adapter_tensors, merge
from flowrl.engines.models.parameters import check_finite, replace_parameter

ADAPTER_WEIGHTS = "adapter_model.safetensors"

_MATRIX = ".lora_"
"""Part of the names of the matrices A and B."""

_MATRICES = ("A.weight", "B.weight")
"""Ends of the names of the matrices, after `_MATRIX`."""

_HEADS = ("lm_head", "score")
"""Names of heads. An adapter of a policy is also read by critics, which lack its head, and the reverse."""

_ACCEPTED = {
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "modules_to_save", "fan_in_fan_out",
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config",
    "ensure_weight_tying",
}  # fmt: skip
"""Settings of peft that may have any value, because a merge reads them, finds their effect in the names and shapes of
the weights, or does not depend on them.
"""

_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initial values (pissa, olora, ...) also change the base model.
    "init_lora_weights": (True, False, "gaussian", "eva"),
}
"""Setting of peft -> supported values, besides none. All other settings must be empty."""


@dataclass(frozen=True)
class LayerChange:
    """Change of the weight of one linear layer: the scaled product B A."""

    a: Tensor
    b: Tensor
    scaling: float
    is_transposed: bool

    def merge(self, stored: Tensor, slices: tuple[slice, ...] = ()) -> Tensor:
        """Returns the sum of a weight and its change, in the dtype of the weight. `slices`: the part of the weight that
        `stored` has.
        """
        return merge(stored, self.a, self.b, self.scaling, is_transposed=self.is_transposed, slices=slices)


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter that was read from its folder."""

    folder: Path
    rank: int
    scaling: float
    tensors: Mapping[str, Tensor]
    """Weights by their names in the file, without the prefix of peft."""

    @classmethod
    def read(cls, folder: Path) -> "SavedAdapter":
        """Reads an adapter. Raises LoraError if it is damaged, or if it is more than products of two matrices and
        complete weights.
        """
        file = folder / ADAPTER_WEIGHTS
        try:
            settings = read_json(folder / ADAPTER_SETTINGS)
            rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
            with safe_open(file, "pt") as weights:
                tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 (a file)
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            reason = str(error).split("\n")[0]
            raise LoraError(
                f"adapter {folder} cannot be read ({reason}): use a folder in the format of peft with "
                f"{ADAPTER_SETTINGS} and {file.name}"
            ) from error
        for name, value in settings.items():
            if name not in _ACCEPTED and value not in (*_SUPPORTED.get(name, (False, {}, [])), None):
                raise LoraError(
                    f"adapter {folder} has {name} {value}, but a run reads only plain LoRA adapters: merge it "
                    f"into its model with peft, and set path to the result"
                )
        for name, tensor in tensors.items():
            check_finite(tensor, name, file)
            path, _, matrix = name.partition(_MATRIX)
            pair = {f"{path}{_MATRIX}{end}" for end in _MATRICES}
            if matrix and not (matrix in _MATRICES and pair <= tensors.keys()):
                raise LoraError(
                    f"adapter {folder} has the weight {name}, but a run reads only pairs of matrices lora_A.weight and "
                    f"lora_B.weight: merge it into its model with peft, and set path to the result"
                )
        scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        return cls(folder, rank, scaling, {name.removeprefix(SAVED_PREFIX): own for name, own in tensors.items()})

    def without_matrices(self) -> "SavedAdapter":
        """Returns only the weights of `modules_to_save`."""
        return replace(self, tensors={name: tensor for name, tensor in self.tensors.items() if _MATRIX not in name})

    def changes(self, model: PreTrainedModel) -> dict[str, LayerChange]:
        """Returns the changes of the weights of a model without an adapter, by name. Raises LoraError if a layer is
        not in the model, or has another size.
        """
        changes: dict[str, LayerChange] = {}
        for name in self.tensors:
            path, _, matrix = name.partition(_MATRIX)
            if matrix != _MATRICES[0]:
                continue
            layer_path = next((own for own in _model_names(model, path) if _linear(model, own) is not None), None)
            layer = None if layer_path is None else _linear(model, layer_path)
            a, b = self.tensors[name], self.tensors[f"{path}{_MATRIX}{_MATRICES[1]}"]
            is_transposed = isinstance(layer, Conv1D)
            shape = None if layer is None else tuple(layer.weight.shape)
            if shape is None or (b.shape[0], a.shape[1]) != (shape[::-1] if is_transposed else shape):
                size = [b.shape[0], a.shape[1]]
                own = "has no such layer" if shape is None else f"has {list(shape[::-1] if is_transposed else shape)}"
                raise LoraError(
                    f"adapter {self.folder} has a linear layer {path} of size {size}, but the model "
                    f"{type(model).__name__} {own}: set path to the base model of the adapter"
                )
            changes[f"{layer_path}.weight"] = LayerChange(a, b, self.scaling, is_transposed)
        return changes

    def weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Returns the weights of `modules_to_save` that a model has, by their names in the model.

        Raises LoraError if one has another shape, or if it is neither in the model
        nor a head.
        """
        known, weights = dict(model.named_parameters(remove_duplicate=False)), {}
        for name, tensor in self.tensors.items():
            own = next((own for own in _model_names(model, name) if own in known), None)
            if _MATRIX in name or (own is None and name.split(".")[-2:-1][0] in _HEADS):
                continue
            if own is None:
                raise LoraError(
                    f"adapter {self.folder} has the weight {name}, which is not in the model {type(model).__name__}: "
                    f"set path to the base model of the adapter"
                )
            if known[own].shape != tensor.shape:
                raise LoraError(
                    f"adapter {self.folder} has the weight {name} of shape {list(tensor.shape)}, but the model has "
                    f"{list(known[own].shape)}: set path to the base model of the adapter"
                )
            weights[own] = tensor
        return weights

    def merge_into(self, model: PreTrainedModel) -> None:
        """Adds the adapter to the weights of a model without an adapter, in place."""
        with torch.no_grad():
            for name, change in self.changes(model).items():
                weight = model.get_parameter(name)
                weight.copy_(change.merge(weight))
            for name, tensor in self.weights(model).items():
                model.get_parameter(name).copy_(tensor)

    def continue_in(self, model: PreTrainedModel) -> None:
        """Copies the matrices to the adapter of a model, which is trained.

        The model already has the weights of `modules_to_save`. Raises LoraError if the settings of the adapters differ.
        """
        own, scalings = adapter_tensors(model)
        matrices = {name: tensor for name, tensor in self.tensors.items() if _MATRIX in name}
        matrices = {next((n for n in _model_names(model, name) if n in own), name): t for name, t in matrices.items()}
        different = sorted({name for name in own if _MATRIX in name} ^ matrices.keys())
        different += [name for name, tensor in matrices.items() if name in own and own[name].shape != tensor.shape]
        complete = {name for name in own if _MATRIX not in name}
        different += sorted(complete ^ self.weights(model).keys())
        if different or not all(math.isclose(scaling, self.scaling) for scaling in scalings):
            ranks = {tensor.shape[0] for name, tensor in own.items() if name.endswith(f"{_MATRIX}A.weight")}
            what = (
                f"{different[0]} is missing, or has another shape"
                if different
                else f"its scale is {self.scaling:g}, not {max(scalings):g}"
            )
            what = what if self.rank in ranks else f"its rank is {self.rank}, not {max(ranks)}"
            raise LoraError(
                f"lora differs from the adapter {self.folder}, which it continues ({what}): set rank, alpha, rslora, "
                f"targets and modules_to_save as in its {ADAPTER_SETTINGS}, or remove lora to merge the adapter and "
                f"train all weights"
            )
        set_adapter(model, matrices)


def set_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the weights of an unsharded model's adapter. Names are those of `adapter_tensors`.

    Weights on the meta device become real ones. A tied weight is replaced under all of its names.
    """
    own, _ = adapter_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            target = own[name]
            if target.is_meta:
                replace_parameter(model, name, tensor.to(target.dtype, copy=True))
            else:
                target.copy_(tensor)


def _linear(model: PreTrainedModel, path: str) -> nn.Linear | Conv1D | None:
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return None
    return layer if isinstance(layer, nn.Linear | Conv1D) else None


def _model_names(model: PreTrainedModel, name: str) -> Iterator[str]:
    """Yields the possible names of a layer or weight in a model: with and without the prefix of the backbone, because
    the adapter may be that of a model with another head.
    """
    prefix = f"{model.base_model_prefix}."
    yield from (name, name.removeprefix(prefix), prefix + name)
