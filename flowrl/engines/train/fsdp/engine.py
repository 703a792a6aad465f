"""The training engine for transformers models, for any sharding of the model.

Every rank takes part in the same collectives, even if it has no rows. In a sharded model, ranks with fewer
micro-batches therefore run dummy micro-batches.
"""

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowrl.config import (
    TRAIN_ENGINES,
    EngineConfig,
    OptimizerConfig,
    TrainedConfig,
    compiles,
    shards_model,
)
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.dtypes import torch_dtype
from flowrl.data.metric import Metric, merge_metrics
from flowrl.devices.device import find_compiler_problem, get_device
from flowrl.devices.host_copies import HostCopies
from flowrl.engines.models.adapters.lora import adapter_disabled, adapter_layers, unique_adapter_tensors
from flowrl.engines.models.adapters.quantized_base import QuantizedLinear
from flowrl.engines.models.attention import has_grouped_kernel, packing_obstacle
from flowrl.engines.models.loading import (
    TrainedModel,
    describe_model,
    inner_model,
    num_embeddings,
)
from flowrl.engines.models.parameters import to_full_tensor
from flowrl.engines.models.routing import ROUTES, find_routers, mixture_of
from flowrl.engines.models.sequence_sharding import SequenceShardable, enable_ulysses_attention, local_tokens
from flowrl.engines.models.sharded_loading import load_shards, move_loaded, quantize_base
from flowrl.engines.models.weight_samples import WeightSamples, weight_samples
from flowrl.engines.models.weights import WeightShape, export_weight_part, full_weights, weight_shapes
from flowrl.engines.parallel.expert_parallel import owned_experts
from flowrl.engines.parallel.gradients import Gradients, ReplicatedGradients, ShardedGradients
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh, rank_mesh
from flowrl.engines.parallel.sharding import (
    can_pack_rows,
    check_weight_dtype,
    choose_attention,
    language_models,
    layers,
    make_sequence_sharding,
    reshard_weights,
    shard_model,
)
from flowrl.engines.train.base import (
    Denominators,
    LossTerm,
    Outputs,
    TrainContext,
    collect_outputs,
    count_targets,
    mask_outputs,
)
from flowrl.engines.train.fsdp.activation_offload import offload_inputs
from flowrl.engines.train.fsdp.outputs import Compute, PolicyModel
from flowrl.engines.train.fsdp.role_model import load_model, saved_model
from flowrl.engines.train.fsdp.routers import RouteReplay, RouterLoss
from flowrl.engines.train.microbatch import Groups, MicroBatch, empty_microbatch, index_groups, microbatches
from flowrl.engines.train.model_flops import model_flops
from flowrl.engines.train.module_engine import OPTIMIZER, ModuleEngine, split_quantized
from flowrl.engines.train.optimizers import check_groups, trained_weights
from flowrl.engines.train.steps import OptimizerSteps

ComputeTerm = Callable[[MicroBatch], tuple[Tensor, Mapping[str, Metric]]]
"""Type of a function that returns a micro-batch's term of a loss, and metrics."""

_logger = logging.getLogger(__name__)

_MAX_GRAPHS = 64
"""Limit of the number of graphs that torch compiles from the code of a layer. Each size of a model needs its own graphs
for passes with and without gradients, and for padded rows."""


class FsdpEngine(ModuleEngine):
    """Runs forward passes of a transformers model over batches. With an optimizer, also trains the model.

    Implements `TrainEngine` and `SharedModel`. The model stays in evaluation mode. Dropout would make the trained
    policy differ from the sampling policy.
    """

    capabilities = TRAIN_ENGINES["fsdp"]

    @classmethod
    def start(cls, context: TrainContext) -> "FsdpEngine":
        """Loads the model of a role, adds its adapter, and returns the engine."""
        config = context.config
        mesh = rank_mesh(
            context.group,
            device=context.device,
            tp=context.tp,
            sp=context.sp,
            shard_ranks=context.shard_ranks,
            expert_parallel=config.engine.expert_parallel,
        )
        lora = config.lora if isinstance(config, TrainedConfig) else None
        is_quantized = lora is not None and lora.base_quantization is not None
        model, compute = load_model(context, on_meta=is_sharded(config.engine, mesh) or is_quantized)
        if is_quantized:
            quantize_base(inner_model(saved_model(model))[0], context.device)
        optimizer, coef = None, None
        if isinstance(config, TrainedConfig):
            optimizer, coef = config.optimizer, config.router_loss_coef
        return cls(model, compute, optimizer, config.engine, mesh=mesh, device=context.device, router_loss_coef=coef)

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        optimizer: OptimizerConfig | None,
        engine: EngineConfig,
        *,
        mesh: RankMesh = SINGLE_PROCESS,
        device: torch.device | str = "cpu",
        router_loss_coef: float | None = None,
    ) -> None:
        """Moves the model to the device and shards it as `engine.strategy` requires.

        Args:
            model: model with the same weights on every rank. It is trained in place. If the engine shards the model,
                its weights may be on the meta device (`load_policy(..., on_meta=True)`).
            compute: returns the outputs of the model for a micro-batch.
            optimizer: settings of the optimizer. None for a model that is not trained.
            engine: strategy, precision and token budget.
            mesh: process groups of the role.
            device: `cpu` or `cuda:N`.
            router_loss_coef: coefficient of the auxiliary loss of a mixture of experts. None: the one in its
                configuration.
        Raises ValueError if the strategy does not support the mesh, and EngineError if the model does not support the
        engine settings.
        """
        self.device = torch.device(device)
        self.mesh, self.group = mesh, mesh.all_ranks
        self.is_sharded = is_sharded(engine, mesh)
        home = torch.device("cpu") if self.is_sharded and engine.offload == "parameters" else self.device
        self._host_weights = HostCopies(get_device(home))
        self._host_gradients, self._host_moments = (HostCopies(get_device(home), compares=False) for _ in range(2))
        self._compute, self._engine = compute, engine
        self._max_tokens = engine.max_tokens_per_microbatch * (1 if mesh.sequence is None else mesh.sequence.size())
        self._compute_dtype = None if engine.compute_dtype is None else torch_dtype(engine.compute_dtype)
        check_weight_dtype(model, self._compute_dtype)
        self.model = move_loaded(model, self.device).eval()
        dtype = self._compute_dtype or next((weight.dtype for weight in model.parameters()), torch.float32)
        self._is_packing = can_pack_rows(model, engine, self.device.type, dtype)
        for language_model in language_models(model):
            self._prepare(language_model, dtype)
        self._sequence_sharding = make_sequence_sharding(engine, mesh)
        if self._sequence_sharding is not None:
            assert isinstance(model, SequenceShardable), "sequence parallelism needs a SequenceShardable"
            model.sequence_sharding = self._sequence_sharding
        if self._is_compiled():
            for layer in layers(model):
                compile_layer(layer)
            if isinstance(model, PolicyModel):
                model.compiles_head = True
        self._flops = model_flops(self._whole_model)
        self._num_peers = mesh.tp * (1 if mesh.sequence is None else mesh.sequence.size())
        """Number of ranks that share the work for the rows of this rank."""
        self._used = {"flops": 0.0, "tokens": 0.0}
        if self.is_sharded:
            shard_model(model, mesh, engine, self._compute_dtype)
        load_shards(model, home)
        self._gradients = self._make_gradients([weight for weight in model.parameters() if weight.requires_grad])
        self._router_loss, self._replay = _find_routers(model, optimizer, router_loss_coef, mesh)
        if optimizer is not None:
            check_groups(trained_weights(self._whole_model), optimizer)
            self._steps = OptimizerSteps(
                model,
                self._gradients,
                optimizer,
                mesh=mesh,
                shards_state=engine.strategy == "zero1",
                is_float16=engine.compute_dtype == "float16",
                with_state=self._with_optimizer_state,
            )

    def _prepare(self, language_model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Enables gradient checkpointing and its offload, and selects the attention for activations of a dtype."""
        engine, sequence = self._engine, self.mesh.sequence
        if engine.gradient_checkpointing:
            language_model.gradient_checkpointing_enable({"use_reentrant": False})
        if engine.offload_activations:
            offload_inputs(language_model, layers(language_model), get_device(self.device))
        # With sequence-parallel norms, transformers would create attention masks of the length of a sequence shard.
        # In float32 on a GPU, its attention would save the attention weights of all pairs of tokens.
        needs_own = engine.sequence_parallel_norms or not has_grouped_kernel(self.device.type, dtype)
        without_masks = self._is_packing or (needs_own and packing_obstacle(language_model) is None)
        choose_attention(language_model, engine, self.device, dtype, without_masks=without_masks)
        if sequence is not None:
            enable_ulysses_attention(language_model, sequence)

    @property
    def _whole_model(self) -> nn.Module:
        """The model of all ranks, possibly without weights."""
        return self.model

    def _make_gradients(self, weights: Sequence[nn.Parameter], *, can_overlap: bool = True) -> Gradients:
        """Returns the gradients of weights. With `can_overlap`, their sum may overlap with the backward pass."""
        if self.is_sharded:
            return ShardedGradients(weights, self.mesh, owned_experts(self.model))
        overlaps = self._engine.overlap_all_reduce
        overlaps = self.device.type == "cuda" if overlaps == "auto" else overlaps
        return ReplicatedGradients(weights, self.mesh, overlaps=overlaps and can_overlap)

    def _is_compiled(self) -> bool:
        """Returns whether layers are compiled. Logs a warning if this host cannot compile for its GPU."""
        # Layers with quantized weights have not run compiled on a GPU.
        is_quantized = any(isinstance(module, QuantizedLinear) for module in self.model.modules())
        is_parallel = self.has_collective_forward or is_quantized
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        on_gpu = self.device.type == "cuda"
        if not compiles(self._engine, on_gpu=on_gpu, is_parallel=is_parallel, is_deterministic=is_deterministic):
            return False
        if any(mixture_of(language_model) is not None for language_model in language_models(self.model)):
            return False  # shapes of experts depend on routes, and hooks observe the routers
        if self._engine.compile == "auto" and (problem := find_compiler_problem(get_device(self.device))) is not None:
            _logger.warning(
                "engine.compile is auto, but %s, so layers are not compiled and steps take longer: correct this, or "
                "set engine.compile: false",
                problem,
            )
            return False
        return True

    def pop_usage(self) -> dict[str, float]:
        """Returns the model FLOPs and the tokens of the passes since the last call, as this rank's share. It is
        empty if no pass has run, and lacks `flops` if the model has no formula.
        """
        used, self._used = self._used, {"flops": 0.0, "tokens": 0.0}
        return {name: value / self._num_peers for name, value in used.items() if value}

    def _add_usage(self, batch: TensorDictBase, outputs: Outputs, *, is_training: bool) -> None:
        lengths_B = lengths(batch)
        mask_T = None if outputs.mask is None else batch["tokens", outputs.mask]
        num_tokens = int(lengths_B.sum())
        self._used["tokens"] += num_tokens
        if self._flops is not None:
            num_targets = num_tokens if mask_T is None else int(mask_T.sum())
            self._used["flops"] += self._flops.count(lengths_B.tolist(), num_targets, is_training=is_training)

    def forward(self, batch: TensorDictBase, outputs: Outputs) -> dict[str, Tensor]:
        """Returns outputs of a batch, without gradients. See `TrainEngine`."""
        self._add_usage(batch, outputs, is_training=False)
        base = adapter_disabled(self.model) if outputs.without_adapter else nullcontext()
        with base, self._replaying(batch), torch.no_grad():
            collected = collect_outputs(batch, outputs, self._passes(batch, outputs))
        if self.is_sharded:
            reshard_weights(self.model)
        return collected

    def _passes(self, batch: TensorDictBase, outputs: Outputs) -> Iterator[tuple[MicroBatch, Mapping[str, Tensor]]]:
        micros = microbatches(batch, self._max_tokens, packed=self._is_packing)
        num_passes = int(self.mesh.gather(self._counts(len(micros))).max()) if self.is_sharded else len(micros)
        fetched: deque[tuple[MicroBatch, Callable[[], dict[str, Tensor]]]] = deque()
        for i, micro in enumerate(self._with_dummies(micros, batch, num_passes)):
            values = self._outputs(self._to_device(micro, outputs), outputs)
            if i < len(micros):
                fetched.append((micro, get_device(self.device).fetch(values)))
            if len(fetched) > 1:  # one pass later, so that the device computes while the host waits for the copies
                own, wait = fetched.popleft()
                yield own, wait()
        for own, wait in fetched:
            yield own, wait()

    def _replaying(self, batch: TensorDictBase) -> AbstractContextManager[None]:
        """Returns a context in which passes use the routes of the batch, if it has the column `routes`."""
        has_routes = self._replay is not None and ROUTES in batch["tokens"].keys()  # noqa: SIM118 (a TensorDict)
        return self._replay.active() if has_routes and self._replay is not None else nullcontext()

    def _to_device(self, micro: MicroBatch, outputs: Outputs) -> MicroBatch:
        """Returns a micro-batch on the device, with the number of its targets, which is known only on the host."""
        return replace(micro, num_targets=int(outputs.mask_of(micro)[:, 1:].sum())).to(self.device)

    def _outputs(self, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
        counting, layout = nullcontext(), (self._sequence_sharding, micro.pack)
        if self._replay is not None and ROUTES in micro.tokens:
            self._replay.set(local_tokens(micro.tokens[ROUTES], *layout))
        if self._router_loss is not None:
            counting = self._router_loss.counting(local_tokens(micro.mask, *layout).flatten())
        with self._autocast(), counting:
            return mask_outputs(self._compute(self.model, micro, outputs), micro, outputs)

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
        """Adds the gradient of `weight` times a loss to the gradient of the next optimizer step. See `TrainEngine`."""
        steps, routers = self.steps, self._router_loss
        with steps.dropping_on_failure():
            micros, num_own, num_passes, denominators = self._split(batch, outputs, groups)
            if not steps.begin_loss(denominators, is_last=is_last):
                return {}
            self._add_usage(batch, outputs, is_training=True)
            factor = steps.loss_factor * weight

            def term(micro: MicroBatch) -> tuple[Tensor, Mapping[str, Metric]]:
                term, metrics = self._loss_term(micro, loss, outputs, denominators)
                if routers is not None and routers.needs_counts:
                    routers.share_counts()
                return term * factor, metrics

            observing = nullcontext() if routers is None else routers.active(self.device, factor)
            with self._training(), self._replaying(batch), observing:
                if routers is not None and routers.needs_counts and (num_passes > 1 or not micros):
                    routers.count_all([self._count_pass(micro, outputs) for micro in micros])
                metrics = self._run_passes(micros, term, num_own - 1 if is_last else None)[:num_own]
                return merge_metrics(metrics if routers is None else [*metrics, routers.metrics()])

    def _run_passes(
        self, micros: Sequence[MicroBatch], compute: ComputeTerm, last: int | None
    ) -> list[Mapping[str, Metric]]:
        """Runs a forward and a backward pass over each micro-batch, and returns the metrics of each.

        Args:
            micros: micro-batches on the CPU, with dummy micro-batches at the end.
            compute: runs the forward pass of a micro-batch. Returns its term of the gradient's loss, and metrics.
            last: index of the micro-batch whose backward pass completes the gradients of the step. None: no such pass.
        """
        metrics = []
        for i, micro in enumerate(micros):
            term, micro_metrics = compute(micro)
            with self._gradients.last_pass() if i == last else nullcontext():
                term.backward()
            metrics.append(micro_metrics)
        return metrics

    def _count_pass(self, micro: MicroBatch, outputs: Outputs) -> Callable[[], object]:
        """Returns a forward pass of a micro-batch without targets, whose head therefore takes no time."""
        assert outputs.mask is not None, "a loss has a mask of trained tokens"
        without_targets = replace(micro, tokens={**micro.tokens, outputs.mask: torch.zeros_like(micro.mask)})
        return lambda: self._outputs(self._to_device(without_targets, outputs), outputs)

    def measure(
        self, batch: TensorDictBase, loss: LossTerm, outputs: Outputs, *, groups: Groups | None = None
    ) -> dict[str, Metric]:
        """Returns the metrics of a loss, as `forward_backward` does, without computing a gradient."""
        micros, num_own, _, denominators = self._split(batch, outputs, groups)
        self._add_usage(batch, outputs, is_training=False)
        metrics: list[Mapping[str, Metric]] = []
        with self._replaying(batch), torch.no_grad():
            for i, micro in enumerate(micros if denominators.tokens else ()):
                _, micro_metrics = self._loss_term(micro, loss, outputs, denominators)
                if i < num_own:
                    metrics.append(micro_metrics)
        if self.is_sharded:
            reshard_weights(self.model)
        return merge_metrics(metrics)

    def _loss_term(
        self, micro: MicroBatch, loss: LossTerm, outputs: Outputs, denominators: Denominators
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        """Returns a micro-batch's term of a loss, and metrics. Outputs that the loss does not use are freed, with their
        graphs, before the backward pass.
        """
        micro = self._to_device(micro, outputs)
        values = self._outputs(micro, outputs)
        with self._autocast():
            return loss(values, micro, denominators)

    def update(self, batch: TensorDictBase, loss: LossTerm, outputs: Outputs) -> dict[str, Metric]:
        """Takes one optimizer step on one loss: `forward_backward` and then `optim_step`. Returns their metrics."""
        metrics = self.forward_backward(batch, loss, outputs, is_last=True)
        return merge_metrics([metrics, self.optim_step()])

    # Weights.

    @property
    def language_model(self) -> PreTrainedModel:
        """The causal language model of a policy, without the wrapper that computes its outputs."""
        assert isinstance(self.model, PolicyModel), "only a policy has a causal language model"
        return self.model.language_model

    @property
    def has_collective_forward(self) -> bool:
        return self.is_sharded or self.mesh.sequence is not None

    @property
    def num_embeddings(self) -> int:
        return num_embeddings(next(language_models(self._whole_model)))

    @property
    def _saved(self) -> TrainedModel:
        return saved_model(self._whole_model)

    def weight_shapes(self, dtype: torch.dtype | None = None) -> list[WeightShape]:
        return weight_shapes(self._saved, dtype=dtype)

    def export_weights(
        self, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        return full_weights(self._saved, names, dtype)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in unique_adapter_tensors(self.language_model).items():
            yield name, to_full_tensor(tensor)

    @property
    def weight_part(self) -> tuple[int | None, int]:
        """Part of the weights that this rank can send: its FSDP2 shard, or an equal share of a replica's rows.

        Rank 0 exports all weights if they are merged with an adapter, or sharded by tensor parallelism.
        """
        rank, num_ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        if self.mesh.tp > 1 or adapter_layers(self.model):
            return (None if rank else 0), 1
        if not self.is_sharded:
            return rank, num_ranks
        assert self.mesh.devices is not None, "a sharded model has a mesh"
        shards = self.mesh.devices["shard"]
        is_first_copy = self.mesh.devices["replicate"].get_local_rank() == 0
        return (shards.get_local_rank() if is_first_copy else None), shards.size()

    def export_part(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        index, count = self.weight_part
        assert index is not None and count > 1, "this rank exports a part without the others"
        return export_weight_part(self._saved, index, count, names, dtype)

    def weight_samples(
        self, version: int, *, subset: int = 0, num_subsets: int | None = None, dtype: torch.dtype | None = None
    ) -> WeightSamples:
        is_receiver = self.group is None or self.group.rank() == 0
        return weight_samples(
            self.language_model,
            version,
            subset=subset,
            num_subsets=num_subsets,
            dtype=dtype,
            is_receiver=is_receiver,
        )

    def describe_model(self) -> dict[str, bytes]:
        return describe_model(self._saved)

    # Memory.

    def offload(self, *, keep_weights: bool = False) -> None:
        """Moves optimizer state to host memory until the next optimizer step, and weights and accumulated gradients
        until `onload`. With `keep_weights`, weights and gradients stay, and weights are copied in the background.
        """
        self._offload_optimizer_state()
        weights = [*self.model.parameters(), *self.model.buffers()]
        if keep_weights:
            self._host_weights.start_copy(weights)
        else:
            self._host_weights.offload(weights)
            self._host_gradients.offload(weight.grad for weight in weights if weight.grad is not None)

    def onload(self) -> None:
        self._host_weights.onload()
        self._host_gradients.onload()
        self._host_gradients.forget()  # the gradients of the next step have other memory

    def save_state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        state = super().save_state(with_optimizer=with_optimizer)
        return {name: self._host_moments.read(tensor) for name, tensor in state.items()}

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None:
        super().load_state(tensors, counters)
        self._host_weights.mark_changed(self.model.parameters())
        if not any(name.startswith(OPTIMIZER) for name in tensors):
            return
        self._host_moments.forget()  # the optimizer has other tensors now
        if self._engine.offload == "optimizer":
            self._offload_optimizer_state()

    def optim_step(self) -> dict[str, Metric]:
        try:
            return super().optim_step()
        finally:
            self._host_weights.mark_changed(weight for weight in self.model.parameters() if weight.requires_grad)

    def _offload_optimizer_state(self) -> None:
        self._host_moments.offload(self._optimizer_tensors())

    def _optimizer_tensors(self) -> list[Tensor]:
        """Returns the state of the optimizer, except for numbers such as Adam's step counts."""
        states = () if self.optimizer is None else self.optimizer.state.values()
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim]
        return [part for tensor in tensors for part in split_quantized(tensor).values()]

    def _split(
        self, batch: TensorDictBase, outputs: Outputs, groups: Groups | None
    ) -> tuple[list[MicroBatch], int, int, Denominators]:
        """Returns the micro-batches, the number of them before the dummy micro-batches, the largest number of
        micro-batches of any rank, and the denominators.
        """
        groups_B = None if groups is None else index_groups(batch, groups)
        micros = microbatches(batch, self._max_tokens, packed=self._is_packing, groups_B=groups_B)
        denominators, num_passes = self._count_globally(batch, outputs, groups_B, len(micros))
        return [*self._with_dummies(micros, batch, num_passes, groups)], len(micros), num_passes, denominators

    def _count_globally(
        self, batch: TensorDictBase, outputs: Outputs, groups_B: Tensor | None, num_micros: int
    ) -> tuple[Denominators, int]:
        """Returns the denominators over all ranks, and the largest number of micro-batches of any rank."""
        assert outputs.mask is not None, "a loss has a mask of trained tokens"
        own, weight = count_targets(batch, outputs.mask, groups_B), int(self.mesh.is_row_leader)
        counts = (own.tokens * weight, own.rows * weight, own.groups * weight, num_micros)
        counts = self.mesh.gather(self._counts(*counts))
        return Denominators(*counts[:, :3].sum(0).tolist()), int(counts[:, 3].max())

    def _counts(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _with_dummies(
        self, micros: list[MicroBatch], batch: TensorDictBase, num_passes: int, groups: Groups | None = None
    ) -> Iterator[MicroBatch]:
        """Yields the micro-batches, and then dummy micro-batches for a sharded model, so that all ranks run
        `num_passes` passes.
        """
        yield from micros
        if self.is_sharded:
            yield from [empty_microbatch(batch, packed=self._is_packing, groups=groups)] * (num_passes - len(micros))

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Enables training mode if gradient checkpointing is on. transformers ignores gradient checkpointing in
        evaluation mode.
        """
        if self._engine.gradient_checkpointing:
            self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def _autocast(self) -> torch.autocast:
        """Returns an autocast context. It is disabled for a sharded model, because FSDP2 casts the weights."""
        enabled = self._compute_dtype not in (None, torch.float32) and not self.is_sharded
        return torch.autocast(self.device.type, self._compute_dtype, enabled=enabled)

    @contextmanager
    def _with_optimizer_state(self) -> Iterator[None]:
        """Moves offloaded optimizer state to the device of the weights for an optimizer step."""
        self._host_moments.onload()
        yield
        if self._engine.offload == "optimizer":
            self._offload_optimizer_state()


def _find_routers(
    model: nn.Module, optimizer: OptimizerConfig | None, coef: float | None, mesh: RankMesh
) -> tuple[RouterLoss | None, RouteReplay | None]:
    """Returns the auxiliary loss of a trained model's routers, and the replay of their routes. Both are None for a
    dense or an untrained model.
    """
    mixture = next((part for part in language_models(model) if find_routers(part)), None)
    if mixture is None or optimizer is None:
        return None, None
    return RouterLoss(mixture, coef, mesh), RouteReplay(mixture)


def compile_layer(layer: nn.Module) -> None:
    """Compiles a layer for micro-batches of any size."""
    # torch's limit is 8, but all models of a process share the code of their layers.
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        layer.compile(dynamic=True, recompile_limit=_MAX_GRAPHS)
        return
    # In torch 2.11, the limit is one of the whole process.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
    layer.compile(dynamic=True)


def is_sharded(config: EngineConfig, mesh: RankMesh) -> bool:
    """Returns whether the model is sharded over ranks. Raises ValueError if the strategy does not support the mesh."""
    if mesh.all_ranks is None:
        return False
    num_ranks = mesh.all_ranks.size()
    if config.strategy == "single" and num_ranks > 1:
        raise ValueError(
            f"strategy is single, but the role has {num_ranks} ranks; use auto, ddp, zero1 or fsdp, or one device"
        )
    if config.strategy in ("ddp", "zero1") and mesh.tp > 1:
        raise ValueError(f"strategy is {config.strategy}, but tp is {mesh.tp}; tensor parallelism needs strategy fsdp")
    return shards_model(config, mesh.tp)
