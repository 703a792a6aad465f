"""The training engine for a model whose layers are divided among pipeline stages.

All ranks of a role with the same rows, one or more per stage, split them into the same micro-batches. A stage receives
the hidden states of a micro-batch from the stage before, so it knows their shape. The last stage computes outputs and
losses.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from tensordict import TensorDictBase
from torch import Tensor, distributed, nn

from flowrl.config import TRAIN_ENGINES, EngineConfig, OptimizerConfig, TrainedConfig
from flowrl.data.metric import Metric
from flowrl.engines.models.adapters.lora import ModelWeight, adapter_tensors, unique_adapter_tensors
from flowrl.engines.models.parameters import to_full_tensor
from flowrl.engines.models.weight_samples import WeightSamples, weight_samples
from flowrl.engines.models.weights import unique_weights, weight_shapes
from flowrl.engines.parallel.gradients import Gradients
from flowrl.engines.parallel.pipeline_mesh import PipelineMesh, pipeline_mesh
from flowrl.engines.parallel.sharding import EngineError, language_models
from flowrl.engines.train.base import Denominators, LossTerm, Outputs, TrainContext
from flowrl.engines.train.fsdp.engine import ComputeTerm, FsdpEngine
from flowrl.engines.train.fsdp.outputs import Compute, PolicyModel
from flowrl.engines.train.fsdp.role_model import load_model
from flowrl.engines.train.microbatch import Groups, MicroBatch
from flowrl.engines.train.module_engine import describe_module
from flowrl.engines.train.pipeline.stage_gradients import StageGradients
from flowrl.engines.train.pipeline.stage_model import (
    copy_without_weights,
    cut_model,
    empty_outputs,
    has_tied_head,
)
from flowrl.engines.train.pipeline.stage_schedule import one_forward_one_backward
from flowrl.engines.train.pipeline.stage_transfers import StageTransfers


class PipelineEngine(FsdpEngine):
    """Runs the layers of one stage, and shards them as `FsdpEngine` does over the ranks of the stage.

    Implements `TrainEngine`. A rollout in the same process cannot use the model, which lacks layers.
    """

    capabilities = replace(TRAIN_ENGINES["fsdp"], shares_weights=False)

    @classmethod
    def start(cls, context: TrainContext) -> "PipelineEngine":
        """Creates the model of a role on the meta device, and loads the weights of this stage. Raises EngineError for
        settings that stages do not support.
        """
        config = context.config
        lora = config.lora if isinstance(config, TrainedConfig) else None
        if config.engine.expert_parallel or (lora is not None and lora.base_quantization is not None):
            name = "engine.expert_parallel" if config.engine.expert_parallel else "lora.base_quantization"
            raise EngineError(
                f"{name} is set, which pp {context.pp} does not support: remove {name}, or pp of the role"
            )
        assert context.group is not None, "a pipeline has several ranks"
        mesh = pipeline_mesh(
            context.group,
            device=context.device,
            pp=context.pp,
            tp=context.tp,
            sp=context.sp,
            shard_ranks=context.shard_ranks,
        )
        model, compute = load_model(context, on_meta=True)
        optimizer = config.optimizer if isinstance(config, TrainedConfig) else None
        return cls(model, compute, optimizer, config.engine, mesh=mesh, device=context.device)

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        optimizer: OptimizerConfig | None,
        engine: EngineConfig,
        *,
        mesh: PipelineMesh,
        device: torch.device | str = "cpu",
    ) -> None:
        """Reduces the model to the layers of this stage, in place, and loads, moves and shards it.

        The arguments and errors are those of `FsdpEngine`, except `mesh`. Raises EngineError if the model cannot be
        divided into stages.
        """
        self._pipeline, self._skeleton = mesh, copy_without_weights(model)
        self._transfers = StageTransfers(mesh, torch.device(device))
        self._is_first, self._is_last = mesh.stage == 0, mesh.stage == mesh.num_stages - 1
        own, self._input = cut_model(model, mesh.stage, mesh.num_stages)
        super().__init__(own, compute, optimizer, engine, mesh=mesh.stage_ranks, device=device)
        self.group = mesh.all_ranks
        self._num_peers *= mesh.num_stages
        self._width = next(language_models(self._skeleton)).config.get_text_config().hidden_size
        dtype = next(weight.dtype for name, weight in self._skeleton.named_parameters() if ".lora_" not in name)
        if self._compute_dtype is not None:
            # Autocast adds outputs in its dtype to embeddings in that of the weights.
            dtype = self._compute_dtype if self.is_sharded else torch.promote_types(dtype, self._compute_dtype)
        self._dtype = dtype
        """Dtype of the hidden states between stages."""
        self._stage_of = self._find_stages()

    @property
    def _whole_model(self) -> nn.Module:
        return self._skeleton

    @property
    def has_collective_forward(self) -> bool:
        return True

    @property
    def architecture(self) -> str:
        return describe_module(self._skeleton)

    def _make_gradients(self, weights: Sequence[nn.Parameter], *, can_overlap: bool = True) -> Gradients:
        shared = None
        if has_tied_head(self._skeleton) and (self._is_first or self._is_last):
            embeddings = next(language_models(self.model)).get_input_embeddings()
            assert isinstance(embeddings, nn.Embedding) and isinstance(embeddings.weight, nn.Parameter)
            shared = embeddings.weight if embeddings.weight.requires_grad else None
        own = super()._make_gradients([weight for weight in weights if weight is not shared], can_overlap=can_overlap)
        tied = None if shared is None else super()._make_gradients([shared], can_overlap=False)
        return StageGradients(own, tied, shared, self._pipeline, self.device)

    # Outputs and training.

    def _receive(self, micro: MicroBatch) -> Tensor | None:
        """Receives the hidden states of a micro-batch as input of the model. Returns None in the first stage."""
        if self._is_first:
            return None
        num_rows, length = micro.mask.shape if micro.pack is None else (1, len(micro.pack.positions_T))
        if self.mesh.sequence is not None:
            length = -(-length // self.mesh.sequence.size())
        received_BlD = self._transfers.receive_states((num_rows, length, self._width), self._dtype)
        self._input.hidden_BlD = received_BlD.requires_grad_(torch.is_grad_enabled())
        return received_BlD

    def _run_body(self, micro: MicroBatch) -> Tensor:
        """Runs the layers of a stage before the last one, and sends the hidden states to the next stage."""
        with self._autocast():
            hidden_BlD: Tensor = self.model(micro.input_ids, micro.pack)
        assert hidden_BlD.dtype == self._dtype, f"hidden states are {hidden_BlD.dtype} instead of {self._dtype}"
        self._transfers.send_states(hidden_BlD)
        return hidden_BlD

    def _outputs(self, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
        """Returns the outputs of a micro-batch in the last stage, and zeros in the others."""
        self._receive(micro)
        if self._is_last:
            return super()._outputs(micro, outputs)
        self._run_body(micro)
        return empty_outputs(micro, outputs, self._dtype, self._width)

    def _loss_term(
        self, micro: MicroBatch, loss: LossTerm, outputs: Outputs, denominators: Denominators
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        if self._is_last:
            return super()._loss_term(micro, loss, outputs, denominators)
        self._outputs(micro.to(self.device), outputs)
        return torch.zeros((), device=self.device), {}

    def _run_passes(
        self, micros: Sequence[MicroBatch], compute: ComputeTerm, last: int | None
    ) -> list[Mapping[str, Metric]]:
        metrics: list[Mapping[str, Metric]] = []
        in_flight: deque[tuple[Tensor | None, Tensor]] = deque()
        """Received hidden states, and hidden states or loss, of micro-batches without backward pass."""
        for kind, i in one_forward_one_backward(self._pipeline.stage, self._pipeline.num_stages, len(micros)):
            if kind == "forward" and self._is_last:
                term, micro_metrics = compute(micros[i])
                metrics.append(micro_metrics)
                in_flight.append((self._input.hidden_BlD, term))
            elif kind == "forward":
                micro = micros[i].to(self.device)
                in_flight.append((self._receive(micro), self._run_body(micro)))
            else:
                with self._gradients.last_pass() if i == last else nullcontext():
                    self._run_backward(*in_flight.popleft())
        self._transfers.finish()
        return metrics

    def _run_backward(self, received_BlD: Tensor | None, result: Tensor) -> None:
        """Runs the backward pass of a micro-batch. `result` is the loss in the last stage, and otherwise the hidden
        states, whose gradient the next stage sends.
        """
        gradient = None if self._is_last else self._transfers.receive_gradient(result)
        torch.autograd.backward(result, gradient)
        if received_BlD is not None:
            assert received_BlD.grad is not None, "the layers use their input"
            self._transfers.send_gradient(received_BlD.grad)

    def forward(self, batch: TensorDictBase, outputs: Outputs) -> dict[str, Tensor]:
        """Returns outputs of a batch in the last stage, and zeros in the others. See `TrainEngine`."""
        collected = super().forward(batch, outputs)
        self._transfers.finish()
        return collected

    def measure(
        self, batch: TensorDictBase, loss: LossTerm, outputs: Outputs, *, groups: Groups | None = None
    ) -> dict[str, Metric]:
        metrics = super().measure(batch, loss, outputs, groups=groups)
        self._transfers.finish()
        return metrics

    # Weights.

    @property
    def _own_weights(self) -> dict[str, ModelWeight]:
        """The weights of this stage by the names of `export_weights`."""
        if isinstance(self._skeleton, PolicyModel):
            return unique_weights(self.model.get_submodule("language_model"))
        return unique_weights(self.model)

    def _find_stages(self) -> dict[str, int]:
        """Returns the first stage that has each weight."""
        names: list[list[str]] = [[] for _ in range(self._pipeline.num_stages)]
        distributed.all_gather_object(names, list(self._own_weights), group=self._pipeline.gradients)
        return {name: stage for stage, own in reversed(list(enumerate(names))) for name in own}

    def export_weights(
        self, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields full weights one at a time. The ranks of the stage that has a weight gather and broadcast it."""
        own = self._own_weights
        for name, cast, shape in weight_shapes(self._saved, names, dtype):
            stage = self._stage_of[name]
            if stage == self._pipeline.stage:
                weight = own[name].gather(cast).detach().to(self.device).contiguous()
            else:
                weight = torch.empty(shape, dtype=cast, device=self.device)
            distributed.broadcast(weight, group=self._pipeline.gradients, group_src=stage)
            yield name, weight

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the adapter of all stages, one weight at a time, as `export_weights` does."""
        assert isinstance(self._skeleton, PolicyModel), "the actor has a policy"
        own, _ = adapter_tensors(self.model.get_submodule("language_model"))
        stages: list[list[str]] = [[] for _ in range(self._pipeline.num_stages)]
        distributed.all_gather_object(stages, list(own), group=self._pipeline.gradients)
        for name, meta in unique_adapter_tensors(self._skeleton.language_model).items():
            stage = next(index for index, names in enumerate(stages) if name in names)
            if stage == self._pipeline.stage:
                weight = to_full_tensor(own[name]).to(self.device).contiguous()
            else:
                weight = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            distributed.broadcast(weight, group=self._pipeline.gradients, group_src=stage)
            yield name, weight

    @property
    def weight_part(self) -> tuple[int | None, int]:
        """Rank 0 exports all weights."""
        return (None if self._pipeline.all_ranks.rank() else 0), 1

    def weight_samples(
        self, version: int, *, subset: int = 0, num_subsets: int | None = None, dtype: torch.dtype | None = None
    ) -> WeightSamples:
        def read(name: str) -> Tensor:
            return next(self.export_weights([name], dtype))[1]

        assert isinstance(self._skeleton, PolicyModel), "only the weights of a policy are sent"
        return weight_samples(
            self._skeleton.language_model,
            version,
            subset=subset,
            num_subsets=num_subsets,
            dtype=dtype,
            is_receiver=self._pipeline.all_ranks.rank() == 0,
            read=read,
        )
