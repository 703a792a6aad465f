"""Forward passes over a table, and optimizer steps, whatever ranks the model is spread over.

Shape suffixes: B rows, L the longest row of a micro-batch, T tokens of the table.

One optimizer step is a sum over all its rows, on every rank and in every micro-batch. Its denominators (tokens, rows)
are counted over all ranks before any backward pass, so each micro-batch adds its share of the one gradient, and how
rows were split changes time and memory only. Every rank takes part in the same sums whatever it holds, so one without
rows holds up nobody; where a forward pass itself needs the others, ranks with fewer micro-batches fill up with empty
ones.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from flowrl.config import EngineConfig, OptimizerConfig, shards_model
from flowrl.data.batch.tensordicts import lengths, num_rows
from flowrl.data.metric import Max, Metric, merge_metrics
from flowrl.engines.models.offload import move_model, move_optimizer
from flowrl.engines.models.sequence_sharding import SharesRows, share_attention
from flowrl.engines.models.sharded_loading import place, read_parts
from flowrl.engines.parallel.gradients import Gradients, ShardedGradients, WholeGradients
from flowrl.engines.parallel.rank_mesh import ALONE, RankMesh
from flowrl.engines.parallel.sharding import (
    choose_attention,
    drop_whole_weights,
    language_models,
    layers,
    packs_rows,
    refuse_lower_weights,
    shard_model,
    shared_rows,
)
from flowrl.engines.train.loss_scale import LossScale
from flowrl.engines.train.microbatch import MicroBatch, empty_microbatch, microbatches

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Denominators:
    """Counts of one optimizer step, over all ranks and micro-batches."""

    tokens: int
    """Tokens that are trained on."""
    rows: int
    """Rows that have such a token."""


Forward = Callable[[nn.Module, MicroBatch], Tensor]
"""Gives a value per token [B, L] (or per row [B]) of a micro-batch."""

Loss = Callable[[nn.Module, MicroBatch, Denominators], tuple[Tensor, Mapping[str, Metric]]]
"""Gives a micro-batch's share of the step's loss, a scalar, and what to report."""


class TrainEngine:
    """A model that is run over tables and, given an optimizer, trained.

    The model stays in evaluation mode: dropout would make the policy that is trained another than the one that sampled.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | None,
        engine: EngineConfig,
        *,
        mesh: RankMesh = ALONE,
        device: torch.device | str = "cpu",
    ) -> None:
        """Moves the model to the device, and cuts it where the strategy says so.

        Args:
            model: the same weights on every rank. It is trained in place; others may hold it too, unless it is cut. One
                that is cut may have its weights yet to come (`load_policy(..., parts=True)` and the like).
            optimizer: None for a model that is only run.
            engine: strategy, precision and token budget.
            mesh: the ranks that hold the model together.
            device: `cpu` or `cuda:N`.
        Raises:
            ValueError: strategy `single` with several ranks, or tensor parallelism without fsdp.
            EngineError: the model cannot be cut over these ranks, or lacks the attention that was asked for.
        """
        self.device = torch.device(device)
        self.mesh = mesh
        self.is_sharded = is_sharded(engine, mesh)
        self._home = torch.device("cpu") if self.is_sharded and engine.offload == "parameters" else self.device
        """Where weights lie between passes, and the optimizer steps them."""
        self._engine, self._config = engine, optimizer
        self._max_tokens = engine.max_tokens_per_microbatch * (1 if mesh.sequence is None else mesh.sequence.size())
        self._compute_dtype = None if engine.compute_dtype is None else _DTYPES[engine.compute_dtype]
        refuse_lower_weights(model, self._compute_dtype)
        self.model = place(model, self.device).eval()
        self._packs = packs_rows(model, engine)
        for language_model in language_models(model):
            if engine.gradient_checkpointing:
                language_model.gradient_checkpointing_enable({"use_reentrant": False})
            dtype = self._compute_dtype or language_model.dtype
            # Stretches are longer where attention sees them, and masks are made before: these kernels need none.
            maskless = self._packs or engine.sequence_parallel_norms
            choose_attention(language_model, engine, self.device, dtype, packs=maskless)
            if mesh.sequence is not None:
                share_attention(language_model, mesh.sequence)
        shared = shared_rows(engine, mesh)
        if shared is not None:
            assert isinstance(model, SharesRows), "rows are shared by models that run their backbone by stretches"
            model.shared = shared
        for layer in layers(model) if engine.compile else ():
            layer.compile(dynamic=True)  # every micro-batch has another shape
        if self.is_sharded:
            shard_model(model, mesh, engine, self._compute_dtype)
            read_parts(model, self._home)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients: Gradients = (ShardedGradients if self.is_sharded else WholeGradients)(parameters, mesh)
        self._optimizer = None if optimizer is None else _adamw(parameters, optimizer)
        self.loss_scale = LossScale() if engine.compute_dtype == "float16" else None
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return self._num_steps

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What updates the model; None where it is only run."""
        return self._optimizer

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that hold the model together; None is this process alone."""
        return self.mesh.everyone

    def position(self) -> dict[str, float]:
        """What a checkpoint keeps of the engine besides tensors."""
        found = {"num_steps": float(self._num_steps)}
        if self.loss_scale is not None:
            found |= {"scale_factor": self.loss_scale.factor, "scale_good_steps": float(self.loss_scale.good_steps)}
        return found

    def restore(self, position: Mapping[str, float]) -> None:
        """Goes on from a position; `engine_checkpoint.load` restores model and optimizer."""
        self._num_steps = int(position["num_steps"])
        if self.loss_scale is not None and "scale_factor" in position:
            self.loss_scale = LossScale(position["scale_factor"], int(position["scale_good_steps"]))

    def evaluate(self, table: TensorDictBase, forward: Forward) -> Tensor:
        """A value per token of the table, without gradient.

        Args:
            table: this rank's rows, perhaps none.
            forward: gives [B, L]; what stands at padding is dropped.
        Returns: [T] in the table's order, on the CPU.
        """
        lengths_B = lengths(table)
        starts_B = torch.cumsum(lengths_B, 0) - lengths_B
        results_T = torch.zeros(int(lengths_B.sum()))
        for micro, values_BL in self._forward(table, forward):
            positions_BL = starts_B[micro.index, None] + torch.arange(values_BL.shape[1])
            results_T = results_T.to(values_BL.dtype)
            results_T[positions_BL[micro.mask]] = values_BL[micro.mask]
        return results_T

    def evaluate_rows(self, table: TensorDictBase, forward: Forward) -> Tensor:
        """A value per row of the table, without gradient: as `evaluate`, with a forward that gives [B]."""
        results_B = torch.zeros(num_rows(table))
        for micro, values_B in self._forward(table, forward):
            results_B = results_B.to(values_B.dtype)
            results_B[micro.index] = values_B
        return results_B

    def update(self, table: TensorDictBase, loss: Loss, mask_column: str = "response_mask") -> dict[str, Metric]:
        """One optimizer step.

        Args:
            table: this rank's rows of the step, perhaps none.
            loss: gives each micro-batch's share, divided by the step's denominators.
            mask_column: bool token column, true for tokens that are trained on.
        Returns: what `loss` reported, merged, and `grad_norm` (before clipping), `lr`, `skipped_update` and, in
            float16, `loss_scale`. `skipped_update` is 1 when there was no step: no rank had a token to train on, or
            float16 overflowed; `grad_norm` and `lr` are then absent.
        Raises:
            FloatingPointError: the gradient is not finite; the weights are unchanged.
        """
        assert self._config is not None and self._optimizer is not None, "this engine was made without an optimizer"
        micros = microbatches(table, self._max_tokens, packed=self._packs)
        denominators, num_rounds = self._agree(table, mask_column, len(micros))
        if denominators.tokens == 0:
            return {"skipped_update": Max(1.0)}
        factor = 1.0 if self.loss_scale is None else self.loss_scale.factor
        self._gradients.zero()
        reports: list[Mapping[str, Metric]] = []
        with self._training():
            for number, micro in enumerate(self._filled_up(micros, table, num_rounds)):
                with self._precision():
                    share, report = loss(self.model, micro.to(self.device), denominators)
                (share * factor).backward()
                if number < len(micros):
                    reports.append(report)
        self._gradients.sum()
        return merge_metrics([*reports, self._step(factor)])

    @property
    def leaves_when_idle(self) -> bool:
        """Whether its device memory is for others while they run."""
        return self._engine.offload == "idle"

    def offload(self, *, keep_weights: bool = False) -> None:
        """Moves optimizer state to the CPU until the next step, and weights, unless they are kept, until `onload`."""
        if self._optimizer is not None:
            move_optimizer(self._optimizer, torch.device("cpu"))
        if not keep_weights:
            move_model(self.model, torch.device("cpu"))

    def onload(self) -> None:
        """Moves weights back."""
        move_model(self.model, self._home)

    def _forward(self, table: TensorDictBase, forward: Forward) -> Iterator[tuple[MicroBatch, Tensor]]:
        micros = microbatches(table, self._max_tokens, packed=self._packs)
        num_rounds = int(self.mesh.gather(self._counts(len(micros))).max()) if self.is_sharded else len(micros)
        with torch.no_grad():
            for number, micro in enumerate(self._filled_up(micros, table, num_rounds)):
                with self._precision():
                    values = forward(self.model, micro.to(self.device)).cpu()
                if number < len(micros):
                    yield micro, values
        if self.is_sharded:
            drop_whole_weights(self.model)

    def _agree(self, table: TensorDictBase, mask_column: str, num_micros: int) -> tuple[Denominators, int]:
        """The step's counts over all ranks, and the most micro-batches that one of them has."""
        mask_T, lengths_B = table["tokens", mask_column], lengths(table)
        rows_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        answers = int(self.mesh.counts_rows)
        num_tokens, num_trained_rows = int(mask_T.sum()), len(rows_T[mask_T].unique())
        counts = self.mesh.gather(self._counts(num_tokens * answers, num_trained_rows * answers, num_micros))
        tokens, rows, _ = counts.sum(0).tolist()
        return Denominators(tokens, rows), int(counts[:, 2].max())

    def _counts(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _filled_up(self, micros: list[MicroBatch], table: TensorDictBase, num_rounds: int) -> Iterator[MicroBatch]:
        """A sharded layer is put together from all ranks, so each of them makes as many passes as any other."""
        yield from micros
        if self.is_sharded:
            yield from [empty_microbatch(table, packed=self._packs)] * (num_rounds - len(micros))

    @contextmanager
    def _training(self) -> Iterator[None]:
        """transformers checkpoints activations only of models that are in training mode."""
        if self._engine.gradient_checkpointing:
            self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def _precision(self) -> torch.autocast:
        """FSDP2 computes in another dtype by itself."""
        enabled = self._compute_dtype not in (None, torch.float32) and not self.is_sharded
        return torch.autocast(self.device.type, self._compute_dtype, enabled=enabled)

    def _step(self, factor: float) -> dict[str, Metric]:
        """Clips the gradient, `factor` times too large, and takes the step."""
        assert self._config is not None and self._optimizer is not None
        norm = self._gradients.norm() / factor
        found: dict[str, Metric] = {} if self.loss_scale is None else {"loss_scale": Max(factor)}
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(overflowed=not math.isfinite(norm))
        if not math.isfinite(norm):
            self._gradients.drop()
            if self.loss_scale is not None and factor > 1:
                return found | {"skipped_update": Max(1.0)}
            raise FloatingPointError(
                f"the gradient's norm is {norm} in optimizer step {self._num_steps}: the loss has overflowed; "
                f"lower the learning rate, or look at the advantages and log-probabilities of this step, and at what "
                f"functions of your own return"
            )
        limit = self._config.max_grad_norm
        scale = (limit / norm if limit is not None and norm > limit else 1.0) / factor
        if scale != 1:
            self._gradients.scale(scale)
        lr = learning_rate(self._config, self._num_steps)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = lr
        if self._engine.offload in ("optimizer", "idle"):
            move_optimizer(self._optimizer, self._home)
        self._optimizer.step()
        if self._engine.offload == "optimizer":
            move_optimizer(self._optimizer, torch.device("cpu"))
        self._num_steps += 1
        self._gradients.drop()
        return found | {"grad_norm": Max(norm), "lr": Max(lr), "skipped_update": Max(0.0)}


def is_sharded(config: EngineConfig, mesh: RankMesh) -> bool:
    """Whether ranks hold parts of the model. Raises ValueError for a strategy that the mesh does not allow."""
    if mesh.everyone is None:
        return False
    num_ranks = mesh.everyone.size()
    if config.strategy == "single":
        raise ValueError(
            f"strategy is single, but the model is trained on {num_ranks} ranks; use auto, ddp or fsdp, or one device"
        )
    if config.strategy == "ddp" and mesh.tp > 1:
        raise ValueError(f"strategy is ddp, but tp is {mesh.tp}; tensor parallelism needs strategy fsdp")
    return shards_model(config, num_ranks, mesh.tp)


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The learning rate of an optimizer step.

    It rises linearly over `warmup_steps`, reaching `lr` in the last of them; then it stays, or falls to 0 at
    `total_steps`, linearly or along half a cosine.

    Args:
        config: see its fields.
        step: >= 0, steps taken before this one.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * (1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    # Decay is for matrices: on biases and norm scales it pulls towards an output of 0, not towards simpler weights.
    # A fused update takes tensors that lie on the same ranks.
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        ranks = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, ranks), []).append(parameter)
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
