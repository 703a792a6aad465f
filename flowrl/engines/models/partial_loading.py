"""Models whose files lack weights or have unexpected weights (`model.strict: false`).

transformers compares the names of a model on the meta device with the names in the files, without reading weights.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowrl.engines.models.parameters import set_parameter, unique_parameters

SHOWN_NAMES = 3
"""Largest number of weight names in a message."""


@dataclass(frozen=True)
class WeightDifferences:
    """Names of the weights that only a model or only its files have."""

    missing: tuple[str, ...] = ()
    """Weights of the model that the files lack. A tied weight appears once."""
    unexpected: tuple[str, ...] = ()
    """Weights of the files that the model lacks."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected)

    def describe(self) -> str:
        """Returns the differences as the predicate of a sentence about the model, with a few of the names."""
        parts = [f"lacks {_list_names(self.missing)}"] if self.missing else []
        parts += [f"has {_list_names(self.unexpected, 'unexpected ')}"] if self.unexpected else []
        return " and ".join(parts)


def _list_names(names: Sequence[str], kind: str = "") -> str:
    shown, others = ", ".join(names[:SHOWN_NAMES]), len(names) - SHOWN_NAMES
    noun = "weight" if len(names) == 1 else "weights"
    return f"the {kind}{noun} {shown}" + (f" and {others} more" if others > 0 else "")


def compare_weights(
    model: PreTrainedModel, report: Mapping[str, set[str]], *, ignores_heads: bool
) -> WeightDifferences:
    """Returns the differences of a model and its files.

    Args:
        model: the model, possibly on the meta device.
        report: transformers' report of the load, with the sets `missing_keys` and `unexpected_keys`.
        ignores_heads: whether to ignore unexpected heads in the files, because the role has its own head.
    """
    missing, unexpected = report["missing_keys"], report["unexpected_keys"]
    parameters = [names for names, _ in unique_parameters(model)]
    known = {name for names in parameters for name in names}
    # transformers reports each name of a tied weight.
    lacking = [names[0] for names in parameters if not missing.isdisjoint(names)] + sorted(missing - known)
    if ignores_heads:
        unexpected = {name for name in unexpected if _is_in_backbone(model, name)}
    return WeightDifferences(tuple(lacking), tuple(sorted(unexpected)))


def _is_in_backbone(model: PreTrainedModel, name: str) -> bool:
    """Returns whether a weight of a file belongs to the model without its head. Files have names with and without the
    prefix of the backbone.
    """
    backbone = model.base_model
    prefix = f"{model.base_model_prefix}."
    return name.startswith(prefix) or name.partition(".")[0] in dict(backbone.named_children())


class InitialWeights:
    """Initial values of single weights of a model, drawn as transformers initializes a new model.

    A value depends only on the configuration of the model and on the name of the weight. It is therefore the same on
    all ranks and in all roles, whichever other weights are missing. Values are drawn in float32 on the CPU.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        with torch.device("meta"):
            self._model = type(model)(model.config)
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            _mark(tensor, is_initialized=True)

    def draw(self, name: str) -> Tensor:
        """Returns the initial value of the weight, in float32."""
        empty = self._model.get_parameter(name)
        value = nn.Parameter(torch.zeros(empty.shape, dtype=torch.float32), requires_grad=False)
        for module in self._model.modules():
            _mark(module, is_initialized=False)
        set_parameter(self._model, name, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()))
            # The complete model, because some models initialize a weight in the module that contains its layer.
            self._model.initialize_weights()
        set_parameter(self._model, name, empty)
        return value.detach()

    def fill(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        """Sets weights of an unsharded model to their initial values."""
        for name in names:
            with torch.no_grad():
                model.get_parameter(name).copy_(self.draw(name))


def _mark(part: Tensor | nn.Module, *, is_initialized: bool) -> None:
    vars(part)["_is_hf_initialized"] = is_initialized  # an attribute that transformers adds to tensors and modules
