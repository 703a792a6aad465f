"""Reduces a model to the layers of one pipeline stage.

The modules of other stages are replaced by modules without weights, so that all names and the forward pass of the
transformers model stay the same. The first stage has the embeddings, and the last stage the last norm and the head. If
the head shares the weight of the embeddings, both stages have this weight under the name of the embeddings.

Shape suffixes: B rows, L tokens of the longest row, l tokens of a sequence shard, D hidden size.
"""

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowrl.engines.models.adapters.lora import model_weights
from flowrl.engines.models.attention import Pack
from flowrl.engines.models.loading import CriticModel, RewardModel
from flowrl.engines.models.sequence_sharding import SequenceShardable, run_backbone
from flowrl.engines.parallel.sharding import EngineError, language_models, layers
from flowrl.engines.train.base import ROW_OUTPUTS, Outputs
from flowrl.engines.train.fsdp.outputs import PolicyModel
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.engines.train.pipeline.stage_schedule import FAMILIES, split_layers

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class StageInput:
    """The hidden states that a later stage has received for the current micro-batch."""

    hidden_BlD: Tensor | None = None


class StageBody(SequenceShardable):
    """The layers of a stage before the last one. Returns their hidden states instead of the outputs of the model."""

    def __init__(self, name: str, language_model: PreTrainedModel) -> None:
        """`name` is the name of the language model in the complete model, so that weights keep their names."""
        super().__init__()
        self.add_module(name, language_model)
        self._name = name

    def forward(self, input_ids_BL: Tensor, pack: Pack | None = None) -> Tensor:
        """Returns the hidden states after the last layer of the stage, [B, l, D], or [1, l, D] with a pack."""
        ids_BL = input_ids_BL if pack is None else pack.pack(input_ids_BL)
        language_model = self.get_submodule(self._name)
        assert isinstance(language_model, PreTrainedModel)
        return run_backbone(language_model.base_model, ids_BL, self.sequence_sharding, pack)


class _Absent(nn.Module):
    """Stands for a layer, a norm or a head of another stage. Returns its first argument."""

    def forward(self, hidden_BlD: Tensor, *_: Any, **__: Any) -> Tensor:  # Any: the arguments of any module
        return hidden_BlD


class ReceivedEmbeddings(nn.Embedding):
    """Stands for the input embeddings in a later stage. Returns the received hidden states."""

    def __init__(self, embeddings: nn.Embedding, weight: nn.Parameter | None, received: StageInput) -> None:
        """`weight` is the weight that the head of this stage shares with the embeddings. None without such a head."""
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = embeddings.num_embeddings, embeddings.embedding_dim
        self.padding_idx = embeddings.padding_idx
        self.register_parameter("weight", weight)
        self._received = received

    def forward(self, input: Tensor) -> Tensor:
        hidden_BlD = self._received.hidden_BlD
        assert hidden_BlD is not None, "the stage has received the hidden states"
        return hidden_BlD


def copy_without_weights(model: Model) -> Model:
    """Returns a copy of a model with its parameters on the meta device. The model itself may be on the meta device,
    too.
    """
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, memo)


def has_tied_head(model: nn.Module) -> bool:
    """Returns whether the language-modeling head of a model shares the weight of the input embeddings."""
    language_model = next(language_models(model))
    head, embeddings = language_model.get_output_embeddings(), language_model.get_input_embeddings()
    return isinstance(head, nn.Linear) and isinstance(embeddings, nn.Embedding) and head.weight is embeddings.weight


def cut_model(model: nn.Module, stage: int, num_stages: int) -> tuple[nn.Module, StageInput]:
    """Replaces the modules of other stages in place. Returns the module of the stage, and its input.

    The module is the model itself in the last stage, and a `StageBody` in others.

    Args:
        model: a `PolicyModel`, `CriticModel` or `RewardModel`, possibly on the meta device.
        stage, num_stages: index of the stage, and number of stages.
    Raises EngineError if the model cannot be divided into these stages.
    """
    name = "language_model" if isinstance(model, PolicyModel) else "backbone"
    name = "model" if isinstance(model, RewardModel) else name
    assert isinstance(model, PolicyModel | CriticModel | RewardModel), "the model of a role"
    language_model = model.get_submodule(name)
    assert isinstance(language_model, PreTrainedModel)
    body, embeddings_name, blocks, norms = _find_parts(language_model, num_stages)
    head = language_model.get_output_embeddings()
    costs = [sum(weight.stored.numel() for weight in model_weights(layer).values()) for layer in blocks]
    own = split_layers(costs, num_stages, head=head.weight.numel() if isinstance(head, nn.Linear) else 0)[stage]
    received, is_last = StageInput(), stage == num_stages - 1
    if stage > 0:
        embeddings = body.get_submodule(embeddings_name)
        assert isinstance(embeddings, nn.Embedding) and isinstance(embeddings.weight, nn.Parameter)
        weight = embeddings.weight if is_last and has_tied_head(model) else None
        setattr(body, embeddings_name, ReceivedEmbeddings(embeddings, weight, received))
    for i in range(len(blocks)):
        if not own.start <= i < own.end:
            blocks[i] = _Absent()
    if is_last:
        return model, received
    for norm in norms:
        setattr(body, norm, _Absent())
    head = model.head if isinstance(model, RewardModel) else head
    for child, module in list(language_model.named_children()):
        if module is head:
            setattr(language_model, child, _Absent())
    return StageBody(name, language_model), received


def _find_parts(model: PreTrainedModel, num_stages: int) -> tuple[nn.Module, str, nn.ModuleList, list[str]]:
    """Returns the module that runs the layers, the name of its embeddings, the layers, and the names of its modules
    with weights after the layers.

    Raises EngineError if the model is not of the families `FAMILIES`, or has too few layers.
    """
    if model.config.get_text_config().model_type not in FAMILIES:
        raise EngineError(
            f"{type(model).__name__} does not support pp {num_stages}, only models of the families "
            f"{', '.join(sorted(FAMILIES))} do: remove pp for this role"
        )
    body, found = model.base_model, layers(model)
    children = [(name, child) for name, child in body.named_children() if next(child.parameters(), None) is not None]
    (embeddings, _), (_, blocks), *norms = children
    assert isinstance(blocks, nn.ModuleList), "the weights of these families are embeddings, layers and a last norm"
    if num_stages > len(found):
        raise EngineError(
            f"{type(model).__name__} has {len(found)} layers, fewer than the {num_stages} stages: set pp to at most "
            f"{len(found)}"
        )
    return body, embeddings, blocks, [name for name, _ in norms]


def empty_outputs(micro: MicroBatch, outputs: Outputs, dtype: torch.dtype, width: int) -> dict[str, Tensor]:
    """Returns zeros in the shapes of the outputs of a micro-batch, which stages before the last one return.

    Args:
        micro: the micro-batch.
        outputs: the requested outputs.
        dtype: dtype of hidden states. Other outputs than ids have at least float32.
        width: width D of hidden states.
    """
    num_top = outputs.topk if isinstance(outputs.topk, int) else 0
    if isinstance(outputs.topk, str) and outputs.topk in micro.tokens:
        num_top = micro.tokens[outputs.topk].shape[-1]

    def zeros(name: str) -> Tensor:
        last = (width,) if name == "hidden" else (num_top,) if name.startswith("topk") else ()
        kind = torch.int64 if name == "topk_ids" else dtype
        if name not in ("hidden", "topk_ids"):
            kind = torch.promote_types(dtype, torch.float32)
        shape = micro.mask.shape[:1] if name in ROW_OUTPUTS else micro.mask.shape
        return torch.zeros(*shape, *last, dtype=kind, device=micro.mask.device)

    return {name: zeros(name) for name in outputs.names}
