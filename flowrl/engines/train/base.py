"""The protocol of training engines: named outputs of a model, losses of these outputs, and optimizer steps.

A loss never receives a model. The engine computes the requested outputs of each micro-batch, and a loss is a function
of these outputs and of the columns of the micro-batch. An engine can therefore split a model over processes.

The gradient of an optimizer step is a weighted sum of losses, one per call of `forward_backward`. A loss is a sum over
the rows of all ranks and micro-batches. Its denominators (tokens, rows, groups) are counted over all ranks before its
first backward pass. The gradient therefore does not depend on how rows are split.

Shape suffixes: B rows, L tokens of the longest row of a micro-batch, T tokens of the batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed import ProcessGroup

from flowrl.config import ModelConfig, ModelKind, ModelRoleConfig, TrainCapabilities, UserError, import_attribute
from flowrl.config.base import check_members, missing_members
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.metric import Metric
from flowrl.engines.train.microbatch import Groups, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from flowrl.engines.models.weight_samples import WeightSamples
    from flowrl.engines.models.weights import WeightShape

# Outputs and losses.

ROW_OUTPUTS = ("scores",)
"""Outputs with one value per row. All others have one value, or one tensor of values, per token."""


@dataclass(frozen=True)
class Outputs:
    """A request for outputs of a model, with the settings of their computation.

        logprobs        log-probability of each token given the previous tokens, [B, L]
        entropy         entropy of the distribution of each token, [B, L], in nats
        topk_logprobs   log-probabilities of the candidate tokens at each position, [B, L, K]
        topk_ids        most likely tokens at each position, int64 [B, L, K]. Requires `topk`.
        hidden          last hidden state after each token, [B, L, D], in the dtype of the model
        values          value of the state before each token, [B, L]
        scores          score of each row, [B]

    Log-probabilities, entropies and values have at least float32. All outputs of tokens are 0 at position 0, except
    hidden states.
    """

    names: tuple[str, ...]
    mask: str | None = None
    """Bool token column that marks the needed tokens. Outputs are 0 elsewhere, and no gradient flows through them.
    Hidden states are 0 only at padding. None: all tokens."""
    temperature: float = 1.0
    """Divisor of the logits."""
    topk: int | str = "topk_ids"
    """Candidate tokens of `topk_logprobs`: the number of most likely tokens of this model, or the name of a token
    column of ids."""
    num_tokens: int | None = None
    """Only token ids below it are among the most likely tokens. None allows all ids."""
    detached: tuple[str, ...] = ()
    """Outputs through which no gradient flows. A detached entropy takes less time."""
    without_adapter: bool = False
    """Whether to compute the outputs of the base model of an adapter. Not for training."""

    def mask_of(self, micro: MicroBatch) -> Tensor:
        """Returns the mask [B, L] of the needed tokens of a micro-batch."""
        return micro.mask if self.mask is None else micro.tokens[self.mask]


@dataclass(frozen=True)
class Denominators:
    """The numbers of tokens, rows and groups that contribute to a loss. A loss receives the sums over all ranks."""

    tokens: int
    """Number of tokens that contribute to the loss."""
    rows: int
    """Number of rows with at least one such token."""
    groups: int = 0
    """Number of groups with at least one such token. 0 for a loss without groups."""


LossTerm = Callable[[Mapping[str, Tensor], MicroBatch, Denominators], tuple[Tensor, Mapping[str, Metric]]]
"""Type of a function that returns a micro-batch's term of a loss (a scalar), and metrics. It receives the outputs of
the model by name. The term is already divided by the denominators."""


# Engines.


@dataclass(frozen=True)
class TrainContext:
    """Arguments for the start of a training engine."""

    kind: ModelKind
    config: ModelRoleConfig
    """Settings of the role. A role without an optimizer is not trained."""
    device: torch.device
    """Device of this process: `cpu` or `cuda:N`."""
    group: ProcessGroup | None
    """All ranks of the role, or None for a single process. They are sorted by pipeline stage, and then by their
    data-, sequence- and tensor-parallel index. Tensor-parallel peers are therefore adjacent."""
    pp: int = 1
    sp: int = 1
    tp: int = 1
    shard_ranks: int | None = None
    """Number of data-parallel ranks that share a sharded copy of the model. None: all."""

    @property
    def model(self) -> ModelConfig:
        assert self.config.model is not None, "the role has a model"
        return self.config.model


class SavedEngine(Protocol):
    """The state of an engine that checkpoints save (`flowrl.engines.checkpoint`)."""

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks of the role. None for a single process."""
        ...

    @property
    def architecture(self) -> str:
        """Class and number of parameters of the model, which a checkpoint records."""
        ...

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the engine is trained and its optimizer has taken a step, or has loaded the state of one."""
        ...

    def save_state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """Returns the trained tensors of this rank by name. They may share memory with the engine.

        Names are `model.NAME` for weights and `optimizer.NAME.KEY` for optimizer tensors, as in `module_state`. So that
        `flowrl export` recognizes the weights, NAME has a prefix: `language_model.` for a policy, `model.` for a reward
        model, and `backbone.` and `value_head.` for a critic. With `with_optimizer`, an engine that is trained creates
        missing optimizer tensors first. A tensor is a DTensor, or equal on all ranks that return it.
        """
        ...

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None:
        """Restores `counters` and the tensors of `save_state`, whose values a checkpoint has replaced. Drops the
        accumulated gradient.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Returns all state that is not a tensor, such as the number of optimizer steps.

        Raises UserError between `forward_backward` and `optim_step`, because a checkpoint has no gradients.
        """
        ...


class TrainEngine(SavedEngine, Protocol):
    """Computes outputs of a model over batches, and trains it if its role has an optimizer.

    All ranks of a role call each method together, except `weight_shapes`, `describe_model`, `pop_usage`, `offload` and
    `onload`. A rank may have no rows. The controller reads outputs and metrics of the leaders: the ranks of the last
    pipeline stage whose tensor- and sequence-parallel index is 0. Other ranks return tensors of the same shapes, and
    any metrics. `optim_step` returns the same metrics on all ranks. An error of one rank ends the processes of the
    role.
    """

    capabilities: TrainCapabilities
    """Facts about the engine, as an attribute of the class. A run is checked and planned with them."""

    @classmethod
    def start(cls, context: TrainContext) -> "TrainEngine":
        """Loads the initial weights and returns the engine."""
        ...

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the input embeddings. Token ids must be smaller."""
        ...

    # Outputs and training.

    def forward(self, batch: TensorDictBase, outputs: Outputs) -> dict[str, Tensor]:
        """Returns the outputs of a batch by name. The tensors are on the CPU and have no gradient.

        Outputs of tokens have the shape [T, ...], in the order of the tokens of the batch. Outputs of rows have the
        shape [B].
        """
        ...

    def forward_backward(
        self,
        batch: TensorDictBase,
        loss: LossTerm,
        outputs: Outputs,
        *,
        groups: Groups | None = None,
        weight: float = 1.0,
        is_last: bool = False,
    ) -> dict[str, Metric]:
        """Adds the gradient of `weight` times a loss to the gradient of the next optimizer step.

        Args:
            batch: rows of this rank, possibly none.
            loss: returns a micro-batch's term of the loss. The terms of all micro-batches and ranks are summed.
            outputs: outputs that the loss reads. Their mask marks the trained tokens.
            groups: rows that must be in the same micro-batch. None if the loss treats each row separately.
            weight: weight of the loss in the step.
            is_last: whether the next call is `optim_step`. The engine may then sum the gradients over the ranks during
                the backward pass.
        Returns: metrics of `loss`, merged over micro-batches. Empty if no rank has a trained token.
        Raises the error of `loss`, or UserError if rows of a group are missing. In both cases, all gradients since the
        last optimizer step are dropped.
        """
        ...

    def measure(
        self, batch: TensorDictBase, loss: LossTerm, outputs: Outputs, *, groups: Groups | None = None
    ) -> dict[str, Metric]:
        """Returns the metrics of a loss, as `forward_backward` does, without computing a gradient."""
        ...

    def optim_step(self) -> dict[str, Metric]:
        """Takes an optimizer step on the gradient that `forward_backward` has accumulated.

        Returns: `grad_norm` (before clipping), `lr` and `skipped_update`. If no rank had a trained token, or if float16
            overflowed, `skipped_update` is 1, and `grad_norm` and `lr` are absent.
        Raises UserError without a `forward_backward` since the last step, and FloatingPointError if the gradient is not
        finite. The weights are then unchanged, and the gradient is dropped.
        """
        ...

    def pop_usage(self) -> dict[str, float]:
        """Returns the model FLOPs (`flops`) and tokens (`tokens`) of the passes since the last call, as this rank's
        share. Unknown numbers are missing.
        """
        ...

    # Weights. The names are those that `save_pretrained` writes, with the prefix `model.` for a reward model, and with
    # `backbone.` or `value_head.` for a critic.

    def weight_shapes(self, dtype: torch.dtype | None = None) -> Sequence["WeightShape"]:
        """Returns name, dtype and shape of each weight of the model, in the order of `export_weights`. A tied weight
        appears once. `dtype` replaces the dtype of floating-point weights.
        """
        ...

    def export_weights(
        self, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields full weights one at a time, with merged adapters. Every rank yields the same weights.

        Args:
            names: weights to yield, in this order. None: all.
            dtype: dtype to which floating-point weights are cast. None keeps their dtype.
        """
        ...

    def weight_samples(
        self, version: int, *, subset: int = 0, num_subsets: int | None = None, dtype: torch.dtype | None = None
    ) -> "WeightSamples":
        """Returns the samples of weights that the rollout compares with its own
        (`flowrl.engines.models.weight_samples`). Only those of rank 0 are read.
        """
        ...

    def describe_model(self) -> dict[str, bytes]:
        """Returns the files of a model folder except the weights, such as `config.json`, as name -> contents."""
        ...

    # Memory.

    def offload(self, *, keep_weights: bool) -> None:
        """Moves optimizer state to the CPU until the next optimizer step, and weights until `onload`. `keep_weights`
        leaves the weights on the device. Called only with `engine.offload: idle`.
        """
        ...

    def onload(self) -> None:
        """Moves the weights back to the device. Called only with `engine.offload: idle`."""
        ...


@runtime_checkable
class PartExport(Protocol):
    """An engine whose ranks can export parts of the weights without communication."""

    @property
    def weight_part(self) -> tuple[int | None, int]:
        """Index of the part that this rank exports, and the number of parts. None: other ranks export all parts."""
        ...

    def export_part(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """Yields this rank's part of weights. The arguments are those of `export_weights`."""
        ...


@runtime_checkable
class AdapterExport(Protocol):
    """Method of an engine whose capability `adapters` is true."""

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the full matrices of the adapter, and the weights of `modules_to_save`, one at a time. All ranks call
        this together. Names are those of peft's files without the prefix `base_model.model.`.
        """
        ...


@runtime_checkable
class SharedModel(Protocol):
    """Methods of an engine whose capability `shares_weights` is true."""

    @property
    def language_model(self) -> "PreTrainedModel":
        """The causal language model, possibly sharded, from which a rollout in the same process generates."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has only shards of the weights."""
        ...

    @property
    def has_collective_forward(self) -> bool:
        """Whether all ranks must run a forward pass together."""
        ...


_ENGINE_CLASSES = {"fsdp": "flowrl.engines.train.fsdp.engine:FsdpEngine"}
"""Name -> class of the included engines."""

_PIPELINE_CLASSES = {"fsdp": "flowrl.engines.train.pipeline.engine:PipelineEngine"}
"""Name -> class of the included engines for several pipeline stages."""


def load_train_engine_class(name: str, *, pp: int = 1) -> type[TrainEngine]:
    """Imports the class of a training engine for `pp` pipeline stages, from its name or `module:Class`."""
    classes = _PIPELINE_CLASSES if pp > 1 else _ENGINE_CLASSES
    return import_attribute(classes.get(name, name))


def check_train_engine(name: str) -> None:
    """Raises ConfigError if a user's training engine lacks a method.

    Does not check properties, because the constructor may set them as attributes.
    """
    engine = load_train_engine_class(name)
    protocols = [SavedEngine, TrainEngine]
    protocols += [SharedModel] if engine.capabilities.shares_weights else []
    protocols += [AdapterExport] if engine.capabilities.adapters else []
    check_members(f"training engine {name}", missing_members(engine, protocols, with_properties=False))


# Functions for engines.


def mask_outputs(values: Mapping[str, Tensor], micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    """Returns the outputs of a micro-batch with 0 where `outputs` needs no value, also in place of NaN.

    Raises UserError if `values` lacks an output.
    """
    if missing := [name for name in outputs.names if name not in values]:
        raise UserError(
            f"the training engine does not compute {' and '.join(missing)} (it computes {', '.join(values)}): set "
            f"engine.kind of the role to an engine that does"
        )
    mask_BL = outputs.mask_of(micro)
    masked = {}
    for name in outputs.names:
        mask = mask_BL.any(-1) if name in ROW_OUTPUTS else micro.mask if name == "hidden" else mask_BL
        value = values[name].masked_fill(~mask.view(*mask.shape, *[1] * (values[name].dim() - mask.dim())), 0)
        masked[name] = value.detach() if name in outputs.detached else value
    return masked


def collect_outputs(
    batch: TensorDictBase, outputs: Outputs, passes: Iterable[tuple[MicroBatch, Mapping[str, Tensor]]]
) -> dict[str, Tensor]:
    """Returns the outputs of all micro-batches in the order of the batch, on the CPU.

    Args:
        batch: the rows of which `passes` has the micro-batches.
        outputs: the requested outputs.
        passes: each micro-batch and its outputs, both on the CPU.
    Returns: [T, ...] for outputs of tokens and [B] for outputs of rows. Without rows, T and B are 0.
    """
    lengths_B = lengths(batch)
    starts_B = torch.cumsum(lengths_B, 0) - lengths_B
    collected: dict[str, Tensor] = {}
    for micro, values in passes:
        for name, value in values.items():
            assert value.device.type == "cpu", f"the output {name} is on {value.device}: copy it to the CPU"
            is_of_rows = name in ROW_OUTPUTS
            if name not in collected:
                size = len(lengths_B) if is_of_rows else int(lengths_B.sum())
                collected[name] = value.new_zeros(size, *value.shape[1 if is_of_rows else 2 :])
            if is_of_rows:
                collected[name][micro.index] = value
            else:
                positions_BL = starts_B[micro.index, None] + torch.arange(value.shape[1])
                collected[name][positions_BL[micro.mask]] = value[micro.mask]
    num_top = outputs.topk if isinstance(outputs.topk, int) else 0
    for name in outputs.names:
        if name not in collected:
            collected[name] = torch.zeros((0, num_top) if name.startswith("topk") else 0)
    return collected


def count_targets(batch: TensorDictBase, mask: str, groups_B: Tensor | None) -> Denominators:
    """Returns the denominators of a loss, counted over the rows of this rank.

    Args:
        batch: rows of this rank.
        mask: name of the bool token column that marks the trained tokens.
        groups_B: index of each row's group, from `index_groups`. None for a loss without groups.
    """
    mask_T, lengths_B = batch["tokens", mask], lengths(batch)
    rows_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    trained_rows = rows_T[mask_T].unique()
    num_groups = 0 if groups_B is None else len(groups_B[trained_rows].unique())
    return Denominators(int(mask_T.sum()), len(trained_rows), num_groups)
