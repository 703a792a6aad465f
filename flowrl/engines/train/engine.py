"""Forward passes over a batch and optimizer steps, for any sharding of the model.

Shape suffixes: B rows, L tokens of the longest row of a micro-batch, T tokens of the batch.

The gradient of an optimizer step is a weighted sum of losses, one per call of `forward_backward`. A loss is a sum over
the rows of all ranks and micro-batches. Its denominators (tokens, rows, groups) are counted over all ranks before its
first backward pass. The gradient therefore does not depend on how rows are split.

Every rank takes part in the same collectives, even if it has no rows. In a sharded model, ranks with fewer
micro-batches therefore run dummy micro-batches.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from flowrl.config import EngineConfig, OptimizerConfig, UserError, shards_model
from flowrl.data.batch.tensordicts import lengths, num_rows
from flowrl.data.dtypes import torch_dtype
from flowrl.data.metric import Max, Metric, merge_metrics
from flowrl.engines.models.attention import has_grouped_kernel, packing_obstacle
from flowrl.engines.models.parameters import move_model, move_optimizer
from flowrl.engines.models.sequence_sharding import SequenceShardable, enable_ulysses_attention
from flowrl.engines.models.sharded_loading import load_shards, move_loaded
from flowrl.engines.parallel.gradients import Gradients, ReplicatedGradients, ShardedGradients
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh
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
from flowrl.engines.train.microbatch import Groups, MicroBatch, empty_microbatch, index_groups, microbatches
from flowrl.engines.train.model_flops import model_flops

_GROWTH, _GROWTH_STEPS, _BACKOFF = 2.0, 2000, 0.5


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale of float16, which keeps small gradients from underflowing to 0.

    As in torch and Apex, the scale doubles after 2,000 steps without an overflow. After an overflow, the step is
    skipped and the scale halves. Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2.
    """

    factor: float = 2.0**16
    """Loss scale. The loss is multiplied by it before the backward pass, and the gradients are divided by it
    afterwards.
    """
    good_steps: int = 0
    """Number of steps without an overflow since the last change of the scale."""

    def after(self, *, overflowed: bool) -> "LossScale":
        if overflowed:
            return LossScale(max(self.factor * _BACKOFF, 1.0))
        if self.good_steps + 1 == _GROWTH_STEPS:
            return LossScale(self.factor * _GROWTH)
        return replace(self, good_steps=self.good_steps + 1)


@dataclass(frozen=True)
class Denominators:
    """Denominators of one loss of an optimizer step, counted over all ranks and micro-batches."""

    tokens: int
    """Number of tokens that contribute to the loss."""
    rows: int
    """Number of rows with at least one token that contributes to the loss."""
    groups: int = 0
    """Number of groups with at least one token that contributes to the loss. 0 for a loss without groups."""


Forward = Callable[[nn.Module, MicroBatch], Tensor]
"""Type of a function that returns one value per token [B, L], or per row [B], of a micro-batch."""

LossTerm = Callable[[nn.Module, MicroBatch, Denominators], tuple[Tensor, Mapping[str, Metric]]]
"""Type of a function that returns a micro-batch's term of a loss (a scalar), and metrics."""


class TrainEngine:
    """Runs forward passes of a model over batches. With an optimizer, also trains the model.

    The model stays in evaluation mode. Dropout would make the trained policy differ from the sampling policy.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | None,
        engine: EngineConfig,
        *,
        mesh: RankMesh = SINGLE_PROCESS,
        device: torch.device | str = "cpu",
    ) -> None:
        """Moves the model to the device and shards it as `engine.strategy` requires.

        Args:
            model: model with the same weights on every rank. It is trained in place. If the engine shards the model,
                its weights may be on the meta device (`load_policy(..., on_meta=True)`).
            optimizer: settings of AdamW. None for a model that is not trained.
            engine: strategy, precision and token budget.
            mesh: process groups of the role.
            device: `cpu` or `cuda:N`.
        Raises ValueError if the strategy does not support the mesh, and EngineError if the model does not support the
        engine settings.
        """
        self.device = torch.device(device)
        self.mesh = mesh
        self.is_sharded = is_sharded(engine, mesh)
        self._home = torch.device("cpu") if self.is_sharded and engine.offload == "parameters" else self.device
        """Device of the weights between forward passes and during optimizer steps."""
        self._engine, self._config = engine, optimizer
        self._max_tokens = engine.max_tokens_per_microbatch * (1 if mesh.sequence is None else mesh.sequence.size())
        self._compute_dtype = None if engine.compute_dtype is None else torch_dtype(engine.compute_dtype)
        check_weight_dtype(model, self._compute_dtype)
        self.model = move_loaded(model, self.device).eval()
        weight_dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        dtype = self._compute_dtype or weight_dtype
        self._is_packing = can_pack_rows(model, engine, self.device.type, dtype)
        for language_model in language_models(model):
            if engine.gradient_checkpointing:
                language_model.gradient_checkpointing_enable({"use_reentrant": False})
            # With sequence-parallel norms, transformers would create attention masks of the length of a sequence shard.
            # In float32 on a GPU, its attention would save the attention weights of all pairs of tokens.
            needs_own = engine.sequence_parallel_norms or not has_grouped_kernel(self.device.type, dtype)
            without_masks = self._is_packing or (needs_own and packing_obstacle(language_model) is None)
            choose_attention(language_model, engine, self.device, dtype, without_masks=without_masks)
            if mesh.sequence is not None:
                enable_ulysses_attention(language_model, mesh.sequence)
        sequence_sharding = make_sequence_sharding(engine, mesh)
        if sequence_sharding is not None:
            assert isinstance(model, SequenceShardable), "sequence parallelism needs a SequenceShardable"
            model.sequence_sharding = sequence_sharding
        for layer in layers(model) if engine.compile else ():
            layer.compile(dynamic=True)  # shapes differ between micro-batches
        self._flops = model_flops(model)
        self._num_peers = mesh.tp * (1 if mesh.sequence is None else mesh.sequence.size())
        """Number of ranks that share the work for the rows of this rank."""
        self._used = {"flops": 0.0, "tokens": 0.0}
        if self.is_sharded:
            shard_model(model, mesh, engine, self._compute_dtype)
            load_shards(model, self._home)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients: Gradients = (ShardedGradients if self.is_sharded else ReplicatedGradients)(parameters, mesh)
        self._optimizer = None if optimizer is None else _adamw(parameters, optimizer)
        self.loss_scale = LossScale() if engine.compute_dtype == "float16" else None
        self._num_steps = 0
        self._num_losses: int | None = None
        """Number of losses with trained tokens in the accumulated gradient. None before the first `forward_backward` of
        an optimizer step.
        """

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer

    @property
    def group(self) -> ProcessGroup | None:
        return self.mesh.all_ranks

    def snapshot(self) -> dict[str, float]:
        """Returns the number of optimizer steps and the loss scale.

        Raises UserError between `forward_backward` and `optim_step`, because a checkpoint has no gradients.
        """
        if self._num_losses is not None:
            raise UserError(
                "a checkpoint cannot be saved between forward_backward and optim_step, because it would lack the "
                "accumulated gradient: call optim_step first"
            )
        state = {"num_steps": float(self._num_steps)}
        if self.loss_scale is not None:
            state |= {"scale_factor": self.loss_scale.factor, "scale_good_steps": float(self.loss_scale.good_steps)}
        return state

    def restore(self, state: Mapping[str, float]) -> None:
        """Restores the state that `snapshot` returned, and drops the accumulated gradient. Does not restore the model
        and the optimizer.
        """
        self._drop_gradient()
        self._num_steps = int(state["num_steps"])
        if self.loss_scale is not None and "scale_factor" in state:
            self.loss_scale = LossScale(state["scale_factor"], int(state["scale_good_steps"]))

    def pop_usage(self) -> dict[str, float]:
        """Returns the model FLOPs and the tokens of the passes since the last call, as this rank's share. Without
        passes, it is empty, and without a formula for the model, `flops` is missing.
        """
        used, self._used = self._used, {"flops": 0.0, "tokens": 0.0}
        return {name: value / self._num_peers for name, value in used.items() if value}

    def _add_usage(self, batch: TensorDictBase, mask_column: str, *, is_training: bool) -> None:
        lengths_B, mask_T = lengths(batch), batch["tokens"].get(mask_column)
        num_tokens = int(lengths_B.sum())
        self._used["tokens"] += num_tokens
        if self._flops is not None:
            num_targets = num_tokens if mask_T is None else int(mask_T.sum())
            self._used["flops"] += self._flops.count(lengths_B.tolist(), num_targets, is_training=is_training)

    def evaluate(self, batch: TensorDictBase, forward: Forward) -> Tensor:
        """Computes one value, or one tensor of values, per token of a batch, without gradients.

        Args:
            batch: rows of this rank, possibly none.
            forward: returns values [B, L, ...] of a micro-batch. Values at padding are ignored.
        Returns: [T, ...] in the order of the batch's tokens, on the CPU. Without rows, [0].
        """
        lengths_B = lengths(batch)
        starts_B = torch.cumsum(lengths_B, 0) - lengths_B
        results_T = torch.zeros(int(lengths_B.sum()))
        for i, (micro, values_BL) in enumerate(self._forward(batch, forward)):
            positions_BL = starts_B[micro.index, None] + torch.arange(values_BL.shape[1])
            if i == 0:
                results_T = values_BL.new_zeros(len(results_T), *values_BL.shape[2:])
            results_T[positions_BL[micro.mask]] = values_BL[micro.mask]
        return results_T

    def evaluate_rows(self, batch: TensorDictBase, forward: Forward) -> Tensor:
        """Computes one value per row of a batch, without gradients. `forward` returns [B] for a micro-batch."""
        results_B = torch.zeros(num_rows(batch))
        for micro, values_B in self._forward(batch, forward):
            results_B = results_B.to(values_B.dtype)
            results_B[micro.index] = values_B
        return results_B

    def forward_backward(
        self,
        batch: TensorDictBase,
        loss: LossTerm,
        mask_column: str = "response_mask",
        *,
        groups: Groups | None = None,
        weight: float = 1.0,
    ) -> dict[str, Metric]:
        """Adds the gradient of `weight` times a loss to the gradient of the next optimizer step.

        Args:
            batch: rows of this rank, possibly none.
            loss: returns a micro-batch's term of the loss, already divided by the denominators. The terms of all
                micro-batches and ranks are summed.
            mask_column: name of a bool token column that is true for trained tokens.
            groups: rows that must be in the same micro-batch. None if the loss treats each row separately.
            weight: weight of the loss in the step.
        Returns: metrics of `loss`, merged over micro-batches. Empty if no rank has a trained token.
        Raises the error of `loss`, or UserError if rows of a group are missing. In both cases, all gradients since the
        last optimizer step are dropped.
        """
        assert self._optimizer is not None, "training needs an optimizer"
        try:
            metrics = self._accumulate(batch, loss, mask_column, groups, weight)
        except BaseException:
            self._drop_gradient()
            raise
        return metrics

    def measure(
        self,
        batch: TensorDictBase,
        loss: LossTerm,
        mask_column: str = "response_mask",
        *,
        groups: Groups | None = None,
    ) -> dict[str, Metric]:
        """Returns the metrics of a loss, as `forward_backward` does, without computing a gradient."""
        micros, num_own, denominators = self._split(batch, mask_column, groups)
        self._add_usage(batch, mask_column, is_training=False)
        metrics: list[Mapping[str, Metric]] = []
        with torch.no_grad():
            for i, micro in enumerate(micros if denominators.tokens else ()):
                with self._autocast():
                    _, micro_metrics = loss(self.model, micro.to(self.device), denominators)
                if i < num_own:
                    metrics.append(micro_metrics)
        if self.is_sharded:
            reshard_weights(self.model)
        return merge_metrics(metrics)

    def optim_step(self) -> dict[str, Metric]:
        """Takes an optimizer step on the gradient that `forward_backward` has accumulated.

        Returns: `grad_norm` (before clipping), `lr`, `skipped_update` and, in float16, `loss_scale`. If no rank had a
            trained token, or if float16 overflowed, `skipped_update` is 1, and `grad_norm` and `lr` are absent.
        Raises UserError without a `forward_backward` since the last step, and FloatingPointError if the gradient is not
        finite. The weights are then unchanged, and the gradient is dropped.
        """
        if self._num_losses is None:
            raise UserError(
                "optim_step has no gradient, because no forward_backward has succeeded since the last optimizer step: "
                "call forward_backward first"
            )
        has_gradient, self._num_losses = self._num_losses > 0, None
        if not has_gradient:
            return {"skipped_update": Max(1.0)}
        self._gradients.sum()
        return self._step(self._loss_factor)

    def update(self, batch: TensorDictBase, loss: LossTerm, mask_column: str = "response_mask") -> dict[str, Metric]:
        """Takes one optimizer step on one loss: `forward_backward` and then `optim_step`. Returns their metrics."""
        metrics = self.forward_backward(batch, loss, mask_column)
        return merge_metrics([metrics, self.optim_step()])

    @property
    def offloads_when_idle(self) -> bool:
        """Whether the engine moves its state to the CPU while other roles use its device."""
        return self._engine.offload == "idle"

    def offload(self, *, keep_weights: bool = False) -> None:
        """Moves optimizer state to the CPU until the next optimizer step, and weights until `onload`. `keep_weights`
        leaves the weights on the device.
        """
        if self._optimizer is not None:
            move_optimizer(self._optimizer, torch.device("cpu"))
        if not keep_weights:
            self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self._home)

    def _move(self, device: torch.device) -> None:
        """Moves weights and accumulated gradients to a device."""
        with self._gradients.moved_to(device):
            move_model(self.model, device)

    def _accumulate(
        self, batch: TensorDictBase, loss: LossTerm, mask_column: str, groups: Groups | None, weight: float
    ) -> dict[str, Metric]:
        micros, num_own, denominators = self._split(batch, mask_column, groups)
        if self._num_losses is None:
            self._num_losses = 0
        if denominators.tokens == 0:
            return {}
        self._add_usage(batch, mask_column, is_training=True)
        if self._num_losses == 0:
            self._gradients.zero()
        factor = self._loss_factor * weight
        metrics: list[Mapping[str, Metric]] = []
        with self._training():
            for i, micro in enumerate(micros):
                with self._autocast():
                    micro_loss, micro_metrics = loss(self.model, micro.to(self.device), denominators)
                (micro_loss * factor).backward()
                if i < num_own:
                    metrics.append(micro_metrics)
        self._num_losses += 1
        return merge_metrics(metrics)

    def _split(
        self, batch: TensorDictBase, mask_column: str, groups: Groups | None
    ) -> tuple[Iterator[MicroBatch], int, Denominators]:
        """Returns the micro-batches, the number of them before the dummy micro-batches, and the denominators."""
        groups_B = None if groups is None else index_groups(batch, groups)
        micros = microbatches(batch, self._max_tokens, packed=self._is_packing, groups_B=groups_B)
        denominators, num_passes = self._count_globally(batch, mask_column, groups_B, len(micros))
        return self._with_dummies(micros, batch, num_passes, groups), len(micros), denominators

    @property
    def _loss_factor(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    def _drop_gradient(self) -> None:
        self._num_losses = None
        self._gradients.free()

    def _forward(self, batch: TensorDictBase, forward: Forward) -> Iterator[tuple[MicroBatch, Tensor]]:
        self._add_usage(batch, "response_mask", is_training=False)
        micros = microbatches(batch, self._max_tokens, packed=self._is_packing)
        num_passes = int(self.mesh.gather(self._counts(len(micros))).max()) if self.is_sharded else len(micros)
        with torch.no_grad():
            for i, micro in enumerate(self._with_dummies(micros, batch, num_passes)):
                with self._autocast():
                    values = forward(self.model, micro.to(self.device)).cpu()
                if i < len(micros):
                    yield micro, values
        if self.is_sharded:
            reshard_weights(self.model)

    def _count_globally(
        self, batch: TensorDictBase, mask_column: str, groups_B: Tensor | None, num_micros: int
    ) -> tuple[Denominators, int]:
        """Returns the denominators over all ranks, and the largest number of micro-batches of any rank."""
        mask_T, lengths_B = batch["tokens", mask_column], lengths(batch)
        rows_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        trained_rows = rows_T[mask_T].unique()
        num_groups = 0 if groups_B is None else len(groups_B[trained_rows].unique())
        weight = int(self.mesh.is_row_leader)
        own = (num * weight for num in (int(mask_T.sum()), len(trained_rows), num_groups))
        counts = self.mesh.gather(self._counts(*own, num_micros))
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

    def _step(self, factor: float) -> dict[str, Metric]:
        """Unscales and clips the gradient, and takes the optimizer step."""
        assert self._config is not None and self._optimizer is not None
        norm = self._gradients.norm() / factor
        metrics: dict[str, Metric] = {} if self.loss_scale is None else {"loss_scale": Max(factor)}
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(overflowed=not math.isfinite(norm))
        if not math.isfinite(norm):
            self._gradients.free()
            if self.loss_scale is not None and factor > 1:
                return metrics | {"skipped_update": Max(1.0)}
            raise FloatingPointError(
                f"the gradient norm is {norm} in optimizer step {self._num_steps}: lower the learning rate, or inspect "
                f"the advantages and log-probabilities of this step and the results of custom functions"
            )
        limit = self._config.max_grad_norm
        scale = (limit / norm if limit is not None and norm > limit else 1.0) / factor
        if scale != 1:
            self._gradients.scale(scale)
        self._gradients.cast()
        lr = learning_rate(self._config, self._num_steps)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = lr
        if self._engine.offload in ("optimizer", "idle"):
            move_optimizer(self._optimizer, self._home)
        self._optimizer.step()
        if self._engine.offload == "optimizer":
            move_optimizer(self._optimizer, torch.device("cpu"))
        self._num_steps += 1
        self._gradients.free()
        return metrics | {"grad_norm": Max(norm), "lr": Max(lr), "skipped_update": Max(0.0)}


def is_sharded(config: EngineConfig, mesh: RankMesh) -> bool:
    """Returns whether the model is sharded over ranks. Raises ValueError if the strategy does not support the mesh."""
    if mesh.all_ranks is None:
        return False
    num_ranks = mesh.all_ranks.size()
    if config.strategy == "single" and num_ranks > 1:
        raise ValueError(
            f"strategy is single, but the role has {num_ranks} ranks; use auto, ddp or fsdp, or one device"
        )
    if config.strategy == "ddp" and mesh.tp > 1:
        raise ValueError(f"strategy is ddp, but tp is {mesh.tp}; tensor parallelism needs strategy fsdp")
    return shards_model(config, mesh.tp)


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Returns the learning rate of optimizer step `step`, counted from 0.

    The learning rate rises linearly to `lr` over `warmup_steps`. Afterwards it is constant, or decays to 0 at
    `total_steps`, linearly or along a half cosine. Raises ValueError if the schedule has no end.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.total_steps is None:
        raise ValueError(f"optimizer.schedule {config.schedule} needs an end: set optimizer.total_steps")
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * (1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    # Weight decay applies to matrices only, because it would pull outputs towards 0 on biases and norm scales.
    # A fused update requires parameters of one device mesh.
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": params, "weight_decay": config.weight_decay if is_matrix else 0.0}
            for (is_matrix, _), params in groups.items()
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
