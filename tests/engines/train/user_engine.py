"""A second training engine: the layers of a model are split over processes that send activations to each other.

Stage s has the s-th part of the layers. The first stage also has the embeddings. The last stage has the head and
computes the losses. docs/extend.md describes the engine.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from flowrl.algorithms import token_entropy, token_logprobs
from flowrl.config import TrainCapabilities, TrainedConfig, UserError
from flowrl.data.metric import Metric, merge_metrics
from flowrl.engines.models.loading import describe_model, load_policy
from flowrl.engines.models.weight_samples import WeightSamples, weight_samples
from flowrl.engines.models.weights import WeightShape, meta_copy, weight_shapes
from flowrl.engines.parallel.gradients import ReplicatedGradients
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS
from flowrl.engines.train.base import LossTerm, Outputs, TrainContext, collect_outputs, count_targets, mask_outputs
from flowrl.engines.train.microbatch import Groups, MicroBatch, index_groups, microbatches
from flowrl.engines.train.module_engine import ModuleEngine, describe_module
from flowrl.engines.train.steps import OptimizerSteps


class StageGradients(ReplicatedGradients):
    """Gradients of a stage. Their norm includes the gradients of all stages."""

    group: ProcessGroup | None = None

    def norm(self) -> float:
        square = torch.tensor(super().norm() ** 2, dtype=torch.float64)
        if self.group is not None:
            distributed.all_reduce(square, group=self.group)
        return math.sqrt(square)


class PipelineEngine(ModuleEngine):
    """Implements `TrainEngine` for LLaMA-like models with separate input and output embeddings."""

    capabilities = TrainCapabilities(outputs=("logprobs", "entropy"), dimensions=("pp",))

    @classmethod
    def start(cls, context: TrainContext) -> "PipelineEngine":
        return cls(context)

    def __init__(self, context: TrainContext) -> None:
        model: Any = load_policy(context.model)  # Any: the modules of a transformers model have no types
        if model.config.tie_word_embeddings:
            raise UserError(f"{context.model.path} has tied embeddings, which two stages would share: untie them")
        self.group, self._device = context.group, context.device
        self._max_tokens = context.config.engine.max_tokens_per_microbatch
        self._stage, self._last = 0 if self.group is None else self.group.rank(), context.pp - 1
        self._skeleton = meta_copy(model).to(model.dtype)
        """The full model, without weights."""
        self._model = self._cut(model).to(self._device)
        self.model = nn.Module()
        self.model.add_module("language_model", self._model)  # the names of the included engine in checkpoints
        if isinstance(context.config, TrainedConfig):
            parameters = list(self.model.parameters())
            gradients = StageGradients(parameters, SINGLE_PROCESS)
            gradients.group = self.group
            self._steps = OptimizerSteps(self.model, gradients, context.config.optimizer)

    def _cut(self, model: Any) -> Any:  # Any: as above
        """Replaces the modules of other stages, so that this stage has no memory for them."""
        body, num_layers = model.model, len(model.model.layers)
        bounds = [num_layers * stage // (self._last + 1) for stage in (self._stage, self._stage + 1)]
        self._layers = list(body.layers[bounds[0] : bounds[1]])
        for index in range(num_layers):
            if not bounds[0] <= index < bounds[1]:
                body.layers[index] = nn.Identity()
        if self._stage > 0:
            body.embed_tokens = nn.Identity()
        if self._stage < self._last:
            body.norm = model.lm_head = nn.Identity()
        return model

    # Outputs and training.

    def _run(self, micro: MicroBatch, outputs: Outputs) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Returns the activations before and after the layers of this stage, [B, L, D], and outputs.

        Outputs are zeros except in the last stage.
        """
        body, dtype = self._model.model, self._model.dtype
        positions_1L = torch.arange(micro.input_ids.shape[1], device=self._device)[None]
        if self._stage == 0:
            before_BLD = body.embed_tokens(micro.input_ids)
        else:
            before_BLD = torch.empty(*micro.mask.shape, self._skeleton.config.hidden_size, dtype=dtype)
            before_BLD = before_BLD.to(self._device)
            distributed.recv(before_BLD, group=self.group, group_src=self._stage - 1)
            before_BLD.requires_grad_(torch.is_grad_enabled())
        after_BLD, rotations = before_BLD, body.rotary_emb(before_BLD, positions_1L)
        for layer in self._layers:
            after_BLD = layer(after_BLD, position_ids=positions_1L, position_embeddings=rotations)
        if self._stage < self._last:
            distributed.send(after_BLD.detach(), group=self.group, group_dst=self._stage + 1)
            return before_BLD, after_BLD, {name: torch.zeros_like(micro.mask, dtype=dtype) for name in outputs.names}
        logits_BLV = self._model.lm_head(body.norm(after_BLD))
        values = {"logprobs": token_logprobs(logits_BLV, micro.input_ids, temperature=outputs.temperature)}
        if "entropy" in outputs.names:
            values["entropy"] = token_entropy(logits_BLV, temperature=outputs.temperature)
        return before_BLD, after_BLD, mask_outputs(values, micro, outputs)

    @torch.no_grad()
    def forward(self, batch: TensorDictBase, outputs: Outputs) -> dict[str, Tensor]:
        values = ((micro, self._run(micro.to(self._device), outputs)[2]) for micro in self._split(batch))
        passes = ((micro, {name: value.cpu() for name, value in of_micro.items()}) for micro, of_micro in values)
        return collect_outputs(batch, outputs, passes)

    def _split(self, batch: TensorDictBase, groups_B: Tensor | None = None) -> list[MicroBatch]:
        return microbatches(batch, self._max_tokens, groups_B=groups_B)

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
        assert outputs.mask is not None, "a loss has a mask"
        metrics: list[Mapping[str, Metric]] = []
        with self.steps.dropping_on_failure():
            groups_B = None if groups is None else index_groups(batch, groups)
            counts = count_targets(batch, outputs.mask, groups_B)
            for micro in self._split(batch, groups_B) if self.steps.begin_loss(counts) else ():
                before_BLD, after_BLD, values = self._run(micro := micro.to(self._device), outputs)
                if self._stage == self._last:
                    term, micro_metrics = loss(values, micro, counts)
                    (term * weight).backward()
                    metrics.append(micro_metrics)
                else:
                    gradient_BLD = torch.empty_like(after_BLD)
                    distributed.recv(gradient_BLD, group=self.group, group_src=self._stage + 1)
                    after_BLD.backward(gradient_BLD)
                if self._stage > 0:
                    assert before_BLD.grad is not None, "the layers use their input"
                    distributed.send(before_BLD.grad, group=self.group, group_dst=self._stage - 1)
        return merge_metrics(metrics)

    @torch.no_grad()
    def measure(
        self, batch: TensorDictBase, loss: LossTerm, outputs: Outputs, *, groups: Groups | None = None
    ) -> dict[str, Metric]:
        assert outputs.mask is not None, "a loss has a mask"
        groups_B = None if groups is None else index_groups(batch, groups)
        counts = count_targets(batch, outputs.mask, groups_B)
        micros = [micro.to(self._device) for micro in self._split(batch, groups_B)] if counts.tokens else []
        passes = [(self._run(micro, outputs)[2], micro) for micro in micros]
        return merge_metrics([loss(values, micro, counts)[1] for values, micro in passes])

    # Weights.

    @property
    def architecture(self) -> str:
        return describe_module(self._skeleton)

    @property
    def num_embeddings(self) -> int:
        return self._skeleton.config.vocab_size

    def weight_shapes(self, dtype: torch.dtype | None = None) -> list[WeightShape]:
        return weight_shapes(self._skeleton, dtype=dtype)

    def export_weights(
        self, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        own = dict(self._model.named_parameters())
        for name, stored, shape in weight_shapes(self._skeleton, names):
            # A weight is in one stage, so the sum over the stages is the weight.
            weight = own[name].detach().clone() if name in own else torch.zeros(shape, dtype=stored).to(self._device)
            if self.group is not None:
                distributed.all_reduce(weight, group=self.group)
            yield name, weight.to(dtype or stored)

    def weight_samples(
        self, version: int, *, subset: int = 0, num_subsets: int | None = None, dtype: torch.dtype | None = None
    ) -> WeightSamples:
        def read(name: str) -> Tensor:
            return next(self.export_weights([name], dtype))[1]

        return weight_samples(self._skeleton, version, subset=subset, num_subsets=num_subsets, dtype=dtype, read=read)

    def describe_model(self) -> dict[str, bytes]:
        return describe_model(self._skeleton)
