"""The optimizer steps of an engine: the accumulated gradient, its clipping, the learning rate and the loss scale."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor, nn

from flowrl.config import OptimizerConfig, UserError
from flowrl.data.metric import Max, Metric
from flowrl.engines.parallel.gradients import Gradients
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh
from flowrl.engines.parallel.weight_owners import WeightOwners
from flowrl.engines.train.base import Denominators
from flowrl.engines.train.optimizers import build_optimizer, trained_weights

_GROWTH, _GROWTH_STEPS, _BACKOFF = 2.0, 2000, 0.5


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale of float16, which keeps small gradients from underflowing to 0.

    As in torch and Apex, the scale doubles after 2,000 steps without an overflow. After an overflow, the step is
    skipped and the scale halves. Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2.
    """

    factor: float = 2.0**16
    """Loss scale. It multiplies the loss before the backward pass and divides the gradients afterwards."""
    good_steps: int = 0
    """Number of steps without an overflow since the last change of the scale."""

    def after(self, *, overflowed: bool) -> "LossScale":
        if overflowed:
            return LossScale(max(self.factor * _BACKOFF, 1.0))
        if self.good_steps + 1 == _GROWTH_STEPS:
            return LossScale(self.factor * _GROWTH)
        return replace(self, good_steps=self.good_steps + 1)


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Returns the learning rate of an optimizer step. `step` is the number of steps before it.

    The learning rate rises linearly to `lr` over `warmup_steps`. Afterwards it is constant, or decays to `min_lr` at
    `total_steps`, linearly or along a half cosine. Raises ValueError if a schedule other than `constant` has no
    `total_steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.total_steps is None:
        raise ValueError(f"optimizer.schedule {config.schedule} needs an end: set optimizer.total_steps")
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left


class OptimizerSteps:
    """Optimizer steps, each on the sum of the gradients of one or more losses."""

    def __init__(
        self,
        model: nn.Module,
        gradients: Gradients,
        config: OptimizerConfig,
        *,
        mesh: RankMesh = SINGLE_PROCESS,
        shards_state: bool = False,
        is_float16: bool = False,
        with_state: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Builds the optimizer.

        Args:
            model: module with the weights of this rank. Weights with `requires_grad` are trained.
            gradients: gradients of the trained weights.
            config: settings of the optimizer.
            mesh: ranks of the model.
            shards_state: whether the optimizer state is divided over the ranks of `mesh` (ZeRO-1). Each rank then
                updates its part of the weights and broadcasts it.
            is_float16: whether gradients are computed in float16, which needs a loss scale.
            with_state: returns a context in which the state of the optimizer is on the device of the weights.
        """
        weights = trained_weights(model)
        self.optimizer = build_optimizer(weights, config, mesh)
        self._owners: WeightOwners | None = None
        if shards_state and mesh.all_ranks is not None:
            self._owners = WeightOwners([weight.parameter for weight in weights], mesh.all_ranks)
            self._owners.restrict(self.optimizer)
        self._peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.loss_scale = LossScale() if is_float16 else None
        self.num_steps = 0
        self._gradients, self._config, self._with_state = gradients, config, with_state
        self._num_losses: int | None = None
        """Number of losses with trained tokens in the accumulated gradient. None before the first loss of a step."""
        self._has_last_loss = False

    @property
    def loss_factor(self) -> float:
        """Factor of the losses before the backward pass."""
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    def begin_loss(self, counts: Denominators, *, is_last: bool = False) -> bool:
        """Prepares the backward passes of a loss, which is the last loss of the step if `is_last`. Returns whether the
        loss has trained tokens and thus a gradient.
        """
        assert not self._has_last_loss, "an optimizer step follows the last loss, whose gradients may be summed"
        self._has_last_loss = is_last
        self._num_losses = self._num_losses or 0
        if counts.tokens == 0:
            return False
        if self._num_losses == 0:
            self._gradients.zero()
        if is_last:
            self._gradients.begin_sum()
        self._num_losses += 1
        return True

    @contextmanager
    def dropping_on_failure(self) -> Iterator[None]:
        """Drops the gradients of all losses of the step if the `with` block fails."""
        with ExitStack() as on_error:
            on_error.callback(self.drop)  # an interrupt, too, leaves gradients of only some micro-batches
            yield
            on_error.pop_all()

    def drop(self) -> None:
        """Drops the accumulated gradient."""
        self._num_losses, self._has_last_loss = None, False
        self._gradients.free()

    def take(self) -> dict[str, Metric]:
        """Takes an optimizer step on the accumulated gradient.

        Returns: `grad_norm` (before clipping), `lr`, `lr/GROUP` for each group of weights that sets a rate,
            `skipped_update` and, in float16, `loss_scale`. If no rank had a trained token, or if float16 overflowed,
            `skipped_update` is 1, and the norm and the rates are absent.
        Raises UserError without a loss since the last step, and FloatingPointError if the gradient is not finite. The
        weights are then unchanged, and the gradient is dropped.
        """
        if self._num_losses is None:
            raise UserError(
                "optim_step has no gradient, because no forward_backward has succeeded since the last optimizer step: "
                "call forward_backward first"
            )
        has_gradient, self._num_losses, self._has_last_loss = self._num_losses > 0, None, False
        if not has_gradient:
            return {"skipped_update": Max(1.0)}
        self._gradients.sum()
        factor = self.loss_factor
        norm = self._gradients.norm() / factor
        metrics: dict[str, Metric] = {} if self.loss_scale is None else {"loss_scale": Max(factor)}
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(overflowed=not math.isfinite(norm))
        if not math.isfinite(norm):
            self._gradients.free()
            if self.loss_scale is not None and factor > 1:
                return metrics | {"skipped_update": Max(1.0)}
            raise FloatingPointError(
                f"the gradient norm is {norm} in optimizer step {self.num_steps}: lower the learning rate, or inspect "
                f"the advantages and log-probabilities of this step and the results of custom functions"
            )
        limit = self._config.max_grad_norm
        scale = (limit / norm if limit is not None and norm > limit else 1.0) / factor
        if scale != 1:
            self._gradients.scale(scale)
        self._gradients.cast()
        rates = self._set_rates()
        with self._with_state():
            self.optimizer.step()
        if self._owners is not None:
            self._owners.broadcast()
        self.num_steps += 1
        self._gradients.free()
        return metrics | {"grad_norm": Max(norm), **rates, "skipped_update": Max(0.0)}

    def _set_rates(self) -> dict[str, Metric]:
        """Sets the learning rates of the next step, and returns them by name."""
        config = self._config
        lr = learning_rate(config, self.num_steps)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            rate = lr if peak == config.lr else lr / config.lr * peak
            if isinstance(group["lr"], Tensor):  # compiled steps read this tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        own = {f"lr/{name}": group.lr for name, group in config.groups.items() if group.lr is not None}
        return {"lr": Max(lr), **{name: Max(lr / config.lr * peak) for name, peak in own.items()}}

    def counters(self) -> dict[str, float]:
        """Returns the number of steps and the loss scale. Raises UserError if a gradient is accumulated."""
        if self._num_losses is not None:
            raise UserError(
                "a checkpoint cannot be saved between forward_backward and optim_step, because it would lack the "
                "accumulated gradient: call optim_step first"
            )
        counters = {"num_steps": float(self.num_steps)}
        if self.loss_scale is not None:
            scale = self.loss_scale
            counters |= {"scale_factor": scale.factor, "scale_good_steps": float(scale.good_steps)}
        return counters

    def restore(self, counters: Mapping[str, float]) -> None:
        """Restores `counters`, and drops the accumulated gradient."""
        self.drop()
        self.num_steps = int(counters["num_steps"])
        if self.loss_scale is not None and "scale_factor" in counters:
            self.loss_scale = LossScale(counters["scale_factor"], int(counters["scale_good_steps"]))
