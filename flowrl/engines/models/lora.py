"""LoRA: a model learns by small matrices beside its own, which stay bit for bit as they were loaded.

Hu et al. 2021, https://arxiv.org/abs/2106.09685: a layer of weight W gives W x + alpha / rank B A x, where B starts at
zero. peft puts A and B into the model's layers; the model keeps its class, and its weights are W + alpha / rank B A
under the names that it had without an adapter (`model_weights`).
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flowrl.config import LoraConfig, UserError
from flowrl.data.atomic_folder import appears_whole
from flowrl.engines.models.offload import whole_tensor

_ADAPTER = "default"
"""peft's name for the only adapter of a model."""

_BASE = ".base_layer"
"""Where peft keeps the layer that an adapter stands beside."""

_SAVED_PREFIX = "base_model.model."
"""What peft puts before the names of a model's layers in its files."""


class LoraError(UserError):
    """An adapter does not fit its model."""


def add_adapter(model: PreTrainedModel, config: LoraConfig) -> None:
    """Puts an adapter into a model, in place. It changes no output yet, and is all of the model that is trained.

    Its weights are float32 at least, and the same in every process.

    Args:
        model: whole, on the CPU; its weights may be on `meta` still, and stay there. The adapter's are made at once.
        config: rank, scale, and which layers.
    Raises:
        LoraError: a target is no linear layer of the model.
    """
    targets = _targets(model, config)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] (peft says int, and divides)
        target_modules=list(targets),
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in targets.values()),
    )
    peft.inject_adapter_in_model(settings, model, _ADAPTER)
    generator = torch.Generator().manual_seed(0)
    for layer in adapter_layers(model).values():
        for name, matrix in _matrices(layer).items():
            # Made anew: peft puts them where the layer's weight is, which may be nowhere.
            made = torch.zeros(matrix.shape, dtype=torch.promote_types(matrix.dtype, torch.float32))
            getattr(layer, name)[_ADAPTER].weight = nn.Parameter(made)
        nn.init.kaiming_uniform_(_matrices(layer)["lora_A"], a=math.sqrt(5), generator=generator)


def adapter_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers of a model that have an adapter, by their names; none for a model without."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def cut_layers(model: nn.Module, path: str, *, by_outputs: bool) -> list[str]:
    """Where a tensor-parallel cut of the layer at `path` has to be made, by its outputs or else by its inputs.

    With an adapter those are two linear layers, cut alike: the layer's own, and the matrix that has the same outputs
    (B) or inputs (A). The other one stays whole: it makes rank numbers of each token, or takes them, as all peers do.
    """
    if path not in adapter_layers(model):
        return [path]
    return [path + _BASE, f"{path}.lora_{'B' if by_outputs else 'A'}.{_ADAPTER}"]


def uncut_layers(model: nn.Module, path: str, *, by_outputs: bool) -> list[str]:
    """The other one, where the layer at `path` has an adapter."""
    return [f"{path}.lora_{'A' if by_outputs else 'B'}.{_ADAPTER}"] if path in adapter_layers(model) else []


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within the block the model is the one that the adapter was put into. Not for training."""
    layers = adapter_layers(model).values()
    # Not peft's own switch: it also freezes the adapter, and FSDP asks at a model's first pass what is trained.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass(frozen=True)
class ModelWeight:
    """A weight of the function that a model computes, adapter included."""

    stored: Tensor
    """As the model has it, perhaps a part of it."""
    adapter: LoraLinear | None
    """What is added to it."""

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """All of it in a type, its own by default, a copy only where it has to be.

        All ranks that hold parts of the model call it. Without an adapter each casts its part before they are put
        together; with one, weight and adapter are added as they are.
        """
        if self.adapter is None:
            return whole_tensor(self.stored if dtype is None else self.stored.to(dtype))
        stored = whole_tensor(self.stored)
        matrices = {name: whole_tensor(matrix) for name, matrix in _matrices(self.adapter).items()}
        change = matrices["lora_B"] @ matrices["lora_A"] * self.adapter.scaling[_ADAPTER]
        change = change.T if self.adapter.fan_in_fan_out else change
        return (stored.to(change.dtype) + change).to(dtype or stored.dtype)


def model_weights(model: nn.Module) -> dict[str, ModelWeight]:
    """Every weight of a model under the name it has without an adapter; one that has two names appears under both."""
    layers = adapter_layers(model)
    found = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        owner = path.removesuffix(_BASE)
        if owner in layers:
            found[f"{owner}.{leaf}"] = ModelWeight(weight, layers[owner] if leaf == "weight" else None)
        elif path.partition(".lora_")[0] not in layers:
            found[name] = ModelWeight(weight, None)
    return found


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the adapter's weights, whole, on the CPU, under the names that peft saves them by.

    All ranks that hold parts of the model call it.
    """
    return {name: whole_tensor(matrix).cpu().clone() for name, matrix in _saved(model).items()}


def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Writes what `adapter_state` gave into a model with such an adapter, in place, whatever ranks it is spread over.

    Raises:
        LoraError: a name is missing or unknown, or a weight has another shape. The model is then unchanged.
    """
    targets = _saved(model)
    unfit = list(targets.keys() ^ state.keys())
    unfit += [name for name in targets.keys() & state.keys() if targets[name].shape != state[name].shape]
    if unfit:
        raise LoraError(
            f"the adapter does not fit the model: {len(unfit)} of its weights are missing, unknown or of another "
            f"shape, such as {min(unfit)}; give it to a model with the same lora.rank and lora.targets"
        )
    with torch.no_grad():
        for name, target in targets.items():
            weight = state[name].to(target.device, target.dtype)
            if isinstance(target, DTensor):
                parts = distribute_tensor(weight, target.device_mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(parts.to_local())
            else:
                target.copy_(weight)


def save_adapter(model: PreTrainedModel, base: Path, folder: Path, *, wanted: bool = True) -> None:
    """Writes the adapter alone, as a folder that peft loads onto the model of `base`. It appears whole or not at all.

    All ranks that hold parts of the model call it; those that are not wanted to write help with it.

    Raises:
        LoraError: the folder exists already.
    """
    if wanted and folder.exists():  # a rank that comes late finds what another has written
        raise LoraError(f"{folder} exists already; an adapter is not written over another: name a new folder")
    state = adapter_state(model)
    if not wanted:
        return
    config = model.peft_config[_ADAPTER]
    assert isinstance(config, peft.LoraConfig), "peft leaves it on the model that it changes"
    settings = config.to_dict() | {"base_model_name_or_path": str(base), "inference_mode": True}
    settings["target_modules"] = sorted(settings["target_modules"])
    with appears_whole(folder) as partial:
        (partial / "adapter_config.json").write_text(json.dumps(settings, indent=2, default=str))
        save_file(state, partial / "adapter_model.safetensors", {"format": "pt"})


def _matrices(layer: LoraLinear) -> dict[str, Tensor]:
    """A of [rank, inputs] and B of [outputs, rank]."""
    return {name: getattr(layer, name)[_ADAPTER].weight for name in ("lora_A", "lora_B")}


def _saved(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{_SAVED_PREFIX}{path}.{name}.weight": matrix
        for path, layer in adapter_layers(model).items()
        for name, matrix in _matrices(layer).items()
    }


def _targets(model: PreTrainedModel, config: LoraConfig) -> Mapping[str, nn.Module]:
    """The layers that get an adapter, by their whole names. The head is none of them: its weights are read as such."""
    kind, head = type(model).__name__, model.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    if config.targets == "all_linear":
        return linear
    chosen = {}
    for target in config.targets:
        found = {name: layer for name, layer in linear.items() if f".{name}".endswith(f".{target}")}
        if not found:
            names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise LoraError(f"lora.targets names {target}, which is no inner linear layer of {kind}: choose of {names}")
        chosen |= found
    return chosen
