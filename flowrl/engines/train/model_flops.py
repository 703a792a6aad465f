"""Counts the floating-point operations (FLOPs) that a model needs for a pass over rows. Pure functions.

A product of matrices [n, m] and [m, k] has 2 n m k FLOPs. Only matrix products count: linear layers, routers, the
experts that process a token, queries times keys, and attention weights times values. Other operations are below 1 % for
models with billions of parameters. docs/metrics.md has the formula.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flowrl.config import LoraConfig
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.loading import CriticModel
from flowrl.engines.models.routing import find_routers, is_experts, mixture_of
from flowrl.engines.parallel.sharding import language_models, layers
from flowrl.engines.train.layer_trace import read_architecture

_SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
"""Names of linear layers that read the same input. A trained weight in one of them gives the inputs of the others no
gradient.
"""

_ADAPTER_PARTS = ("base_layer", "lora_A", "lora_B")
"""Names of the parts of a linear layer with a LoRA adapter. `lora_B` reads the output of `lora_A`."""


class Passes(NamedTuple):
    """FLOPs of a forward pass, and of the backward pass that follows it."""

    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model. They depend only on the shapes of the weights, and on which weights are trained."""

    per_token: Passes
    """FLOPs of the linear layers, except the language-modeling head, per token of a row."""
    per_target: Passes
    """FLOPs of the language-modeling head per target. Targets are the tokens with a log-probability."""
    per_pair: Mapping[int | None, Passes]
    """FLOPs of attention per pair of tokens, by the size of the layers' sliding window. The key None has the layers
    without a window.
    """
    recomputed_per_token: int
    """FLOPs of the linear layers that gradient checkpointing computes a second time, per token of a row."""

    def count(self, lengths: Sequence[int], num_targets: int, *, is_training: bool, is_causal: bool = True) -> int:
        """Returns the FLOPs of a pass over rows.

        Args:
            lengths: number of tokens of each row, without padding.
            num_targets: number of tokens with a log-probability.
            is_training: whether a backward pass follows the forward pass.
            is_causal: whether a token attends only to itself and to earlier tokens of the row. False counts all pairs
                of tokens of a row, as torch's FlopCounterMode does, although causal attention needs only half of them.
        """
        parts = [(self.per_token, sum(lengths)), (self.per_target, num_targets), *self._pairs(lengths, is_causal)]
        return sum(count * (passes.forward + is_training * passes.backward) for passes, count in parts)

    def count_recomputed(
        self, lengths: Sequence[int], num_targets: int, *, layers: bool, head: bool, is_causal: bool = True
    ) -> int:
        """Returns the FLOPs that a backward pass computes a second time, which `count` excludes.

        Args:
            lengths, num_targets, is_causal: as in `count`.
            layers: whether gradient checkpointing recomputes the layers.
            head: whether the language-modeling head recomputes its logits in tiles.
        """
        pairs = sum(count * passes.forward for passes, count in self._pairs(lengths, is_causal))
        in_layers = sum(lengths) * self.recomputed_per_token + pairs
        return layers * in_layers + head * num_targets * self.per_target.forward

    def _pairs(self, lengths: Sequence[int], is_causal: bool) -> list[tuple[Passes, int]]:
        """Returns the FLOPs per pair of tokens and the number of pairs, for each size of the sliding window."""
        return [
            (passes, sum(count_pairs(length, window, is_causal=is_causal) for length in lengths))
            for window, passes in self.per_pair.items()
        ]


def count_pairs(length: int, window: int | None = None, *, is_causal: bool = True) -> int:
    """Returns the number of pairs of tokens of a row that attend to each other.

    With a window, a token attends to at most `window` tokens, including itself.
    """
    if not is_causal:
        return length * length
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def model_flops(model: nn.Module) -> ModelFlops | None:
    """Returns the FLOPs of a module with a language model. Returns None without a language model, or if the module has
    unsupported parts, such as convolutions, experts of an unknown family, or layers without attention.

    The backward pass computes the gradient of a weight only if the weight is trained, and the gradient of an input only
    if a trained weight is before it. With an adapter (LoRA), the frozen weights therefore have no gradients, and
    neither have the inputs of the first layer. Recomputation (gradient checkpointing, FlashAttention, tiled heads) does
    not count, because the model does not need it. `ModelFlops.count_recomputed` returns its FLOPs, except those of
    FlashAttention.

    The count assumes that modules are defined in the order of their execution. OPT models that project their embeddings
    are an exception. With an adapter, their count is too small by at most two matrices of the adapter.
    """
    language_model = next(language_models(model), None)
    if language_model is None or not _has_known_matrices(model, language_model):
        return None
    experts, settings = _Experts.of(language_model), language_model.config.get_text_config()
    windows = _windows(settings)
    if windows is None:
        return None
    head, blocks = language_model.get_output_embeddings(), {id(layer) for layer in layers(model)}
    per_token: list[Passes] = []
    per_target: list[Passes] = []
    has_gradient: list[dict[str, bool]] = []
    """For each decoder layer, whether the outputs of its linear layers have gradients, by name."""
    is_trained = False
    """Whether a trained weight is before the current module."""
    inputs: dict[str, bool] = {}
    """Whether the input of linear layers has a gradient, by `_input_owner`."""
    for name, module in model.named_modules():
        if id(module) in blocks:
            has_gradient.append({})
        own = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        if isinstance(module, nn.Linear | Conv1D):
            has_input_gradient = inputs.setdefault(_input_owner(name), is_trained)
            from_adapter = f".{_ADAPTER_PARTS[-1]}." in name
            passes = _matrix_passes(module.weight, 1, is_trained if from_adapter else has_input_gradient)
            (per_target if module is head else per_token).append(passes)
            if has_gradient:
                layer = _layer_name(name).rpartition(".")[2]
                known = has_gradient[-1].get(layer, False)
                has_gradient[-1][layer] = known or has_input_gradient or any(own)
        per_token += [_matrix_passes(weight, used, is_trained) for weight, used in experts.used_weights(module)]
        is_trained = is_trained or any(own)
    per_pair: dict[int | None, Passes] = {}
    for outputs, window in zip(has_gradient, windows, strict=True):
        per_pair[window] = _total([per_pair.get(window, Passes()), _pair_passes(outputs, settings)])
    recomputed = sum(_recomputed_per_token(layer, experts) for layer in layers(model))
    return ModelFlops(_total(per_token), _total(per_target), per_pair, recomputed)


def planned_flops(config: str, *, has_head: bool, lora: LoraConfig | None = None) -> ModelFlops | None:
    """Returns the result of `model_flops` for a model that is not loaded, but created on the meta device.

    Args:
        config: text of the model's `config.json`.
        has_head: whether the model has a language-modeling head. False adds the head of a critic.
        lora: settings of an adapter. None trains all weights. Products for the gradients of `modules_to_save` are not
            counted.
    """
    architecture = read_architecture(config)
    with torch.device("meta"):
        if has_head:
            model = language_model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
        else:
            language_model = AutoModel.from_config(architecture, trust_remote_code=False)
            model = CriticModel(language_model)
        if lora is not None:
            add_adapter(language_model, lora.model_copy(update={"modules_to_save": ()}))
    return model_flops(model)


@dataclass(frozen=True)
class _Experts:
    """The routers of a mixture of experts, and the number of experts that process a token."""

    routers: Sequence[nn.Module] = ()
    per_token: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_Experts":
        mixture = mixture_of(model)
        return cls() if mixture is None else cls(find_routers(model), mixture.per_token)

    def used_weights(self, module: nn.Module) -> list[tuple[Tensor, float]]:
        """Returns (weight, share that a token uses) for each weight of a router or of a layer's experts. The result is
        empty for other modules.
        """
        if module in self.routers:
            return [(module.get_parameter("weight"), 1.0)]
        if self.routers and is_experts(module):
            return [(weight, self.per_token / len(weight)) for weight in module.parameters()]
        return []


def _recomputed_per_token(layer: nn.Module, experts: _Experts) -> int:
    """Returns the FLOPs per token of the matrices of a layer that gradient checkpointing computes a second time.

    The recomputation ends as soon as it has all tensors that the backward pass needs. The backward pass needs the
    result of the last matrix in two cases. In the first, a norm follows, as in layers with more than two norms. In the
    second, the matrix belongs to experts or their router, whose results are multiplied.
    """
    matrices: list[float] = []
    is_product = False
    for module in layer.modules():
        if isinstance(module, nn.Linear | Conv1D):
            matrices.append(2 * module.weight.numel())
            is_product = False
        elif used := experts.used_weights(module):
            matrices.append(sum(2 * weight.numel() * part for weight, part in used))
            is_product = True
    others = (child for child in layer.children() if not isinstance(child, nn.Linear | Conv1D))
    num_norms = sum(any(True for _ in child.parameters(recurse=False)) for child in others)
    return round(sum(matrices if num_norms > 2 or is_product else matrices[:-1]))


def _has_known_matrices(model: nn.Module, language_model: PreTrainedModel) -> bool:
    experts = _Experts.of(language_model)
    return all(
        isinstance(module, nn.Linear | Conv1D | nn.Embedding) or experts.used_weights(module)
        for module in model.modules()
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    )


def _layer_name(name: str) -> str:
    """Returns the name of a linear layer, without the part of its adapter."""
    parts = name.split(".")
    ends = [parts.index(part) for part in _ADAPTER_PARTS if part in parts]
    return ".".join(parts[: min(ends, default=len(parts))])


def _input_owner(name: str) -> str:
    """Returns a name for the input of a linear layer. Layers, and parts of adapted layers, that read the same input
    have the same name.
    """
    path, _, leaf = _layer_name(name).rpartition(".")
    return f"{path}.{next((names[0] for names in _SHARED_INPUTS if leaf in names), leaf)}"


def _matrix_passes(weight: Tensor, used: float, has_input_gradient: bool) -> Passes:
    """Returns the FLOPs per token of the products with a weight, of which a token uses the share `used`."""
    flops = round(2 * weight.numel() * used)
    return Passes(flops, flops * (has_input_gradient + weight.requires_grad))


def _windows(settings: PreTrainedConfig) -> list[int | None] | None:
    """Returns the size of the sliding window of each decoder layer, or None for a layer without a window.

    Returns None if a layer has no attention.
    """
    window, types = getattr(settings, "sliding_window", None), getattr(settings, "layer_types", None)
    if types is None:
        return [window] * settings.num_hidden_layers
    if set(types) - {"full_attention", "sliding_attention"}:
        return None
    return [window if layer_type == "sliding_attention" else None for layer_type in types]


def _pair_passes(outputs: Mapping[str, bool], settings: PreTrainedConfig) -> Passes:
    """Returns the FLOPs of attention in one layer per pair of tokens. `outputs` is the entry of the layer in
    `has_gradient`.
    """
    num_heads = settings.num_attention_heads
    width = getattr(settings, "head_dim", None) or settings.hidden_size // num_heads
    query_width = getattr(settings, "qk_head_dim", None) or width
    value_width = getattr(settings, "v_head_dim", None) or width
    first = next(iter(outputs.values()), False)  # for layers that compute queries, keys and values together
    query, key, value = (outputs.get(name, first) for name in _SHARED_INPUTS[0])
    logits, mixed = 2 * num_heads * query_width, 2 * num_heads * value_width
    # Gradients of queries and keys need the gradient of the attention weights.
    return Passes(logits + mixed, logits * (query + key) + mixed * (value + (query or key)))


def _total(passes: Iterable[Passes]) -> Passes:
    passes = list(passes)
    return Passes(sum(own.forward for own in passes), sum(own.backward for own in passes))
