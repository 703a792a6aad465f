"""LoRA adapters: small trained matrices in the linear layers of a frozen model.

A layer with weight W and an adapter (A, B) returns W x + alpha / rank B A x. B is initialized to zero. peft adds A and
B to the layers in place. `model_weights` returns the merged weights W + alpha / rank B A. Their names are the names in
the model without an adapter.

Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flowrl.config import BaseQuantization, LoraConfig, UserError
from flowrl.data.folders.atomic_folder import write_atomically
from flowrl.engines.models.adapters.quantized_base import QuantizedLinear, round_to_codes
from flowrl.engines.models.parameters import check_finite, to_full_tensor
from flowrl.engines.models.routing import mixture_of

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

_ADAPTER = "default"
"""peft's name of the adapter. A model has only one adapter."""

_QUANTIZATION = "base_quantization"
"""Attribute that `add_adapter` sets in each layer with an adapter."""

_BASE = ".base_layer"
"""Suffix that peft adds to the name of an adapted layer."""

_EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""Names of the matrices of an expert in files."""

SAVED_PREFIX = "base_model.model."
"""Prefix of layer names in peft's files."""


class LoraError(UserError):
    """Raised if an adapter does not match its model."""


def add_adapter(model: PreTrainedModel, config: LoraConfig) -> None:
    """Adds an adapter to a model in place and freezes all other weights, except those of `modules_to_save`. A new
    adapter does not change the model's outputs.

    The matrices of the adapter have at least float32 and are identical in every process.

    Args:
        model: unsharded model, on the CPU or on the meta device.
        config: rank, scale, target layers and fully trained modules.
    Raises LoraError if a target is not a linear layer of the model, or if a module does not exist.
    """
    import peft  # noqa: PLC0415 (a run without LoRA needs no peft)

    trained = _trained_weights(model, config)
    targets = {name: layer for name, layer in _target_layers(model, config).items() if f"{name}.weight" not in trained}
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] (annotated as int, but floats work)
        target_modules=list(targets),
        lora_dropout=0.0,
        use_rslora=config.rslora,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in targets.values()),
    )
    peft.inject_adapter_in_model(settings, model, _ADAPTER)
    for weight in trained.values():
        weight.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    for layer in adapter_layers(model).values():
        vars(layer)[_QUANTIZATION] = config.base_quantization
        for name, matrix in _matrices(layer).items():
            # Allocated again on the CPU, since peft uses the device of the layer's weight, which may be meta.
            zeros = torch.zeros(matrix.shape, dtype=torch.promote_types(matrix.dtype, torch.float32))
            getattr(layer, name)[_ADAPTER].weight = nn.Parameter(zeros)
        nn.init.kaiming_uniform_(_matrices(layer)["lora_A"], a=math.sqrt(5), generator=generator)


def adapter_layers(model: nn.Module) -> "dict[str, LoraLinear]":
    """Returns the layers with an adapter by name."""
    if sys.modules.get("peft") is None:  # no adapter was added in this process
        return {}
    from peft.tuners.lora import Linear as LoraLinear  # noqa: PLC0415 (a run without LoRA needs no peft)

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def base_quantization(layer: "LoraLinear") -> BaseQuantization | None:
    """Returns the quantization of the frozen weight of a layer with an adapter."""
    return vars(layer)[_QUANTIZATION]


def tp_sharded_layers(model: nn.Module, path: str, *, by_outputs: bool) -> list[str]:
    """Returns the names of the linear layers that tensor parallelism shards for the layer at `path`.

    Without an adapter, this is the layer itself. With an adapter, it is the base layer and one of the adapter's
    matrices: B if `by_outputs` (column-wise sharding), otherwise A (row-wise sharding). The second matrix is
    replicated.
    """
    if path not in adapter_layers(model):
        return [path]
    return [path + _BASE, f"{path}.lora_{'B' if by_outputs else 'A'}.{_ADAPTER}"]


def tp_replicated_layers(model: nn.Module, path: str, *, by_outputs: bool) -> list[str]:
    """Returns the name of the adapter matrix that tensor parallelism replicates. The result is empty without an
    adapter.
    """
    return [f"{path}.lora_{'A' if by_outputs else 'B'}.{_ADAPTER}"] if path in adapter_layers(model) else []


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Disables the adapter inside the `with` block, so that forward passes use the base model. Not for training."""
    layers = adapter_layers(model).values()
    # peft's own switch also freezes the adapter, and FSDP records in the first forward pass which weights are trained.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass(frozen=True)
class ModelWeight:
    """A weight of a model, together with its adapter if the weight has an adapter."""

    stored: Tensor
    """Weight without the adapter. It is a DTensor with this rank's shard if the model is sharded."""
    adapter: "LoraLinear | None"
    """Layer with the adapter. None if the weight has no adapter."""

    def gather(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the full merged weight, cast to `dtype` if set. All ranks of a sharded model must call this
        together.
        """
        if self.adapter is None:
            return to_full_tensor(self.stored if dtype is None else self.stored.to(dtype))
        a, b = (to_full_tensor(matrix) for matrix in _matrices(self.adapter).values())
        scaling, is_transposed = self.adapter.scaling[_ADAPTER], self.adapter.fan_in_fan_out
        if isinstance(base := self.adapter.base_layer, QuantizedLinear):
            stored = base.dequantize()
        elif (quantization := base_quantization(self.adapter)) is not None:
            stored = round_to_codes(to_full_tensor(self.stored), quantization)
        else:
            stored = to_full_tensor(self.stored)
        return merge(stored, a, b, scaling, is_transposed=is_transposed, dtype=dtype)


def merge(
    stored: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    *,
    is_transposed: bool,
    slices: tuple[slice, ...] = (),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the weight W + scaling B A in `dtype`, or in the dtype of W. It is computed in at least float32, on the
    device of W.

    Args:
        stored: W, [outputs, inputs], or transposed; with `slices`, this part of it.
        a, b: the matrices of the adapter, [rank, inputs] and [outputs, rank].
        scaling: alpha / rank, or alpha / sqrt(rank).
        is_transposed: whether W is [inputs, outputs].
        slices: part of W. The complete product is computed, because a product of parts can round differently.
    """
    computed = torch.promote_types(stored.dtype, torch.float32)
    a, b = (matrix.to(stored.device, computed) for matrix in (a, b))
    # In place, because the merge of a large weight would otherwise need several copies of it.
    change = (b @ a).mul_(scaling)
    change = (change.T if is_transposed else change)[slices]
    return change.add_(stored.to(change.dtype)).to(dtype or stored.dtype)


def model_weights(model: nn.Module) -> dict[str, ModelWeight]:
    """Returns all weights of a model by name. Adapter matrices are not separate entries: a weight's adapter is part of
    its `ModelWeight`, and only `ModelWeight.gather` merges the two. Names are those of the model without an adapter.
    Tied weights appear under each of their names.
    """
    layers = adapter_layers(model)
    weights = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        owner = path.removesuffix(_BASE)
        if owner in layers:
            weights[f"{owner}.{leaf}"] = ModelWeight(weight, layers[owner] if leaf == "weight" else None)
        elif path.partition(".lora_")[0] not in layers:
            weights[name] = ModelWeight(weight, None)
    return weights


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns a full copy of the adapter weights on the CPU, by their names in peft's files. All ranks of a sharded
    model must call this together.
    """
    tensors, _ = adapter_tensors(model)
    return {f"{SAVED_PREFIX}{name}": to_full_tensor(tensor).cpu().clone() for name, tensor in tensors.items()}


def adapter_tensors(model: nn.Module) -> tuple[dict[str, Tensor], set[float]]:
    """Returns the weights of a policy's adapter by name, with those of `modules_to_save`, and the scales of its layers.

    They are DTensors if the model is sharded. A tied weight appears under each of its names.
    """
    layers = adapter_layers(model)
    tensors: dict[str, Tensor] = {
        f"{path}.{name}.weight": matrix for path, layer in layers.items() for name, matrix in _matrices(layer).items()
    }
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.requires_grad and ".lora_" not in name:
            tensors[name] = weight
    return tensors, {layer.scaling[_ADAPTER] for layer in layers.values()}


def unique_adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns each of `adapter_tensors` once, under the first of its names."""
    tensors, _ = adapter_tensors(model)
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    return {name: tensors[name] for name in names.values()}


def save_adapter(model: PreTrainedModel, base: Path, folder: Path, *, is_writer: bool = True) -> None:
    """Saves the adapter to a folder that peft loads onto the model at `base`. The folder is created atomically.

    All ranks of a sharded model must call this together. Only the rank with `is_writer` writes files. Raises LoraError
    if the folder already exists.
    """
    import peft  # noqa: PLC0415 (a run without LoRA needs no peft)

    if is_writer and folder.exists():  # other ranks may arrive after the writer has finished
        raise LoraError(f"{folder} already exists and would be overwritten: choose a new folder")
    state = adapter_state(model)
    if not is_writer:
        return
    config = model.peft_config[_ADAPTER]
    assert isinstance(config, peft.LoraConfig)
    settings = config.to_dict() | {"base_model_name_or_path": str(base), "inference_mode": True}
    settings["target_modules"] = sorted(settings["target_modules"])
    # Complete paths, because peft selects all modules whose name ends with one of these names.
    modules = {name.removeprefix(SAVED_PREFIX).rpartition(".")[0] for name in state if ".lora_" not in name}
    tensors, _ = adapter_tensors(model)
    is_tied = len({id(tensor) for tensor in tensors.values()}) < len(tensors)
    settings |= {"modules_to_save": sorted(modules) or None, "ensure_weight_tying": is_tied}
    with write_atomically(folder) as partial:
        (partial / "adapter_config.json").write_text(json.dumps(settings, indent=2, default=str))
        save_file(state, partial / "adapter_model.safetensors", {"format": "pt"})


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Adds the weights of a saved adapter to a model, and returns the model, which is modified in place.

    Args:
        model: unsharded model without an adapter.
        folder: folder in the format of peft. Weights are read only from safetensors.
    Raises LoraError if the folder has no adapter, or if the adapter does not match the model. Raises UserError if the
    adapter has NaN or infinite weights.
    """
    import peft  # noqa: PLC0415 (a program without LoRA needs no peft)

    file = folder / "adapter_model.safetensors"
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder))
        with safe_open(file, "pt") as weights:
            names = set(weights.keys())
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        reason = str(error).split("\n")[0]
        raise LoraError(
            f"adapter {folder} cannot be read ({reason}): use a folder in the format of peft with adapter_config.json "
            f"and {file.name}"
        ) from error
    if not isinstance(settings, peft.LoraConfig):
        raise LoraError(f"adapter {folder} is a {settings.peft_type}: only LoRA adapters are supported")
    base = settings.base_model_name_or_path
    try:
        with warnings.catch_warnings(action="ignore"):  # missing weights are an error below
            adapted = peft.PeftModel.from_pretrained(model, str(folder), config=settings)
    except (RuntimeError, ValueError) as error:  # shapes of weights, or missing layers
        reason = " ".join(str(error).split())[:200]
        raise LoraError(f"adapter {folder} does not match the model ({reason}): use the base model {base}") from error
    loaded = peft.get_peft_model_state_dict(adapted)
    if different := sorted(set(loaded) ^ names):
        raise LoraError(
            f"adapter {folder} does not match the model: see the weights {', '.join(different[:3])}; use the base "
            f"model {base}"
        )
    for name, weight in loaded.items():
        check_finite(weight, name, file)
    merged = adapted.merge_and_unload()
    assert isinstance(merged, PreTrainedModel)
    return merged


def _matrices(layer: "LoraLinear") -> dict[str, Tensor]:
    return {name: getattr(layer, name)[_ADAPTER].weight for name in ("lora_A", "lora_B")}


def _target_layers(model: PreTrainedModel, config: LoraConfig) -> Mapping[str, nn.Module]:
    """Returns the layers to adapt, by name. Excludes the output head, because log-probabilities are computed directly
    from its weight.
    """
    head = model.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    if mixture_of(model) is not None:
        # peft takes these names for those of experts, also in dense layers and shared experts.
        linear = {name: m for name, m in linear.items() if name.rpartition(".")[2] not in _EXPERT_MATRICES}
    if config.targets == "all_linear":
        return linear
    chosen = {}
    for target in config.targets:
        matches = {name: layer for name, layer in linear.items() if f".{name}".endswith(f".{target}")}
        if not matches:
            names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise LoraError(
                f"lora.targets has {target}, which is not an inner linear layer of {type(model).__name__}; "
                f"available: {names}"
            )
        chosen |= matches
    return chosen


def _trained_weights(model: PreTrainedModel, config: LoraConfig) -> dict[str, nn.Parameter]:
    """Returns the weights of `modules_to_save` by name. A tied weight appears under each of its names."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    names: set[str] = set()
    for module in config.modules_to_save:
        own = {name for name in weights if f".{module}." in f".{name.rpartition('.')[0]}."}
        if not own:
            available = ", ".join(sorted({name.split(".")[-2] for name in weights if "." in name}))
            raise LoraError(
                f"lora.modules_to_save has {module}, which is not a module of {type(model).__name__}; available: "
                f"{available}"
            )
        names |= own
    trained = {id(weights[name]) for name in names}
    return {name: weight for name, weight in weights.items() if id(weight) in trained}
