"""Forward passes over a table, and optimizer steps.

Shape suffixes: B rows, L the longest row of a micro-batch, T tokens of the table.

One optimizer step is a sum over all its rows, on every rank and in every micro-batch. Its denominators (tokens, rows)
are counted over all ranks before any backward pass, so each micro-batch adds its share of the one gradient, and how
rows were split changes time and memory only. Every rank takes part in the same sums whatever it holds, so one without
rows holds up nobody.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.data.metric import Max, Metric, merge_metrics
from flowrl.data.table import lengths, num_rows
from flowrl.engines.microbatch import MicroBatch, microbatches


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
        group: ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Moves the model to the device.

        Args:
            model: the same weights on every rank. It is trained in place; others may hold it too.
            optimizer: None for a model that is only run.
            engine: strategy and token budget.
            group: the ranks that train together; None is this process alone.
            device: `cpu` or `cuda:N`.
        Raises:
            ValueError: strategy `single` with a group of several ranks.
        """
        num_ranks = distributed.get_world_size(group) if group is not None else 1
        if engine.strategy == "single" and num_ranks > 1:
            raise ValueError(
                f"strategy is single, but the model is trained on {num_ranks} ranks; use auto or ddp, or one device"
            )
        self.model = model.to(device).eval()
        self.device = torch.device(device)
        self._group = group if num_ranks > 1 else None
        self._max_tokens = engine.max_tokens_per_microbatch
        self._config = optimizer
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = None if optimizer is None else _adamw(self._parameters, optimizer)
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
        """The ranks that train together; None is this process alone."""
        return self._group

    def position(self) -> dict[str, float]:
        """What a checkpoint keeps of the engine besides tensors."""
        return {"num_steps": self._num_steps}

    def restore(self, position: Mapping[str, float]) -> None:
        """Goes on from a position; model and optimizer are restored by `flowrl.engines.checkpoint.load`."""
        self._num_steps = int(position["num_steps"])

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
        Returns: what `loss` reported, merged, and `grad_norm` (before clipping), `lr` and `skipped_update`, which is 1
            when no rank had a token to train on: then there is no step and the other two are absent.
        Raises:
            FloatingPointError: the gradient is not finite; the weights are unchanged.
        """
        assert self._config is not None and self._optimizer is not None, "this engine was made without an optimizer"
        denominators = self._denominators(table, mask_column)
        if denominators.tokens == 0:
            return {"skipped_update": Max(1.0)}
        flat_gradients = self._zero_gradients()
        reports: list[Mapping[str, Metric]] = []
        for micro in microbatches(table, self._max_tokens):
            share, report = loss(self.model, micro.to(self.device), denominators)
            share.backward()
            reports.append(report)
        for flat in flat_gradients:
            self._sum_over_ranks(flat)
        norm = self._clip(flat_gradients)
        lr = learning_rate(self._config, self._num_steps)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = lr
        self._optimizer.step()
        self._num_steps += 1
        self._drop_gradients()
        own: dict[str, Metric] = {"grad_norm": Max(norm), "lr": Max(lr), "skipped_update": Max(0.0)}
        return merge_metrics([*reports, own])

    def _forward(self, table: TensorDictBase, forward: Forward) -> Iterator[tuple[MicroBatch, Tensor]]:
        with torch.no_grad():
            for micro in microbatches(table, self._max_tokens):
                yield micro, forward(self.model, micro.to(self.device)).cpu()

    def _denominators(self, table: TensorDictBase, mask_column: str) -> Denominators:
        mask_T, lengths_B = table["tokens", mask_column], lengths(table)
        rows_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        counts = torch.tensor([int(mask_T.sum()), len(rows_T[mask_T].unique())], device=self.device)
        tokens, rows = self._sum_over_ranks(counts).tolist()
        return Denominators(tokens, rows)

    def _zero_gradients(self) -> list[Tensor]:
        """One zero buffer per dtype, of which the gradients are views.

        Backward passes then add into what is summed over ranks, without a copy, and a parameter that none of them
        reached has a gradient of 0 on every rank.
        """
        flat_gradients = []
        for dtype in sorted({parameter.dtype for parameter in self._parameters}, key=str):
            parameters = [parameter for parameter in self._parameters if parameter.dtype == dtype]
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
            for parameter, gradient in zip(parameters, flat.split(sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)
            flat_gradients.append(flat)
        return flat_gradients

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self._group is not None:
            distributed.all_reduce(values, group=self._group)
        return values

    def _clip(self, flat_gradients: list[Tensor]) -> float:
        """Scales the gradient to the largest norm allowed and returns the norm it had."""
        assert self._config is not None
        norm = math.hypot(*(torch.linalg.vector_norm(flat).item() for flat in flat_gradients))
        if not math.isfinite(norm):
            self._drop_gradients()
            raise FloatingPointError(
                f"the gradient's norm is {norm} in optimizer step {self._num_steps}: the loss has overflowed; "
                f"lower the learning rate, or look at the advantages and log-probabilities of this step"
            )
        limit = self._config.max_grad_norm
        if limit is not None and norm > limit:
            for flat in flat_gradients:
                flat.mul_(limit / norm)
        return norm


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
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
