"""Base class of training engines that hold a module and its optimizer in each process."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from flowrl.data.metric import Metric
from flowrl.engines.train.module_state import describe_module, load_module_state, module_state
from flowrl.engines.train.steps import OptimizerSteps


class ModuleEngine:
    """The methods of `TrainEngine` that follow from the weights and the optimizer of this process.

    The constructor of a subclass sets `model` and, for a trained role, `_steps`.
    """

    model: nn.Module
    """Module with the weights of this process, under the names of a checkpoint."""
    group: ProcessGroup | None = None
    """All ranks of the role. None for a single process."""
    _steps: OptimizerSteps | None = None

    @property
    def steps(self) -> OptimizerSteps:
        assert self._steps is not None, "only a trained role takes optimizer steps"
        return self._steps

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self._steps is None else self._steps.optimizer

    def optim_step(self) -> dict[str, Metric]:
        """Takes an optimizer step on the accumulated gradient. See `OptimizerSteps.take`."""
        return self.steps.take()

    def pop_usage(self) -> dict[str, float]:
        return {}

    @property
    def architecture(self) -> str:
        return describe_module(self.model)

    @property
    def has_optimizer_state(self) -> bool:
        return self.optimizer is not None and bool(self.optimizer.state)

    def save_state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        return module_state(self.model, self.optimizer if with_optimizer else None)

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None:
        load_module_state(self.model, self.optimizer, tensors)
        if self._steps is not None:
            self._steps.restore(counters)

    def counters(self) -> dict[str, float]:
        return {} if self._steps is None else self._steps.counters()

    def offload(self, *, keep_weights: bool = False) -> None:
        """Does nothing. An engine that reads the setting `offload` overrides it."""

    def onload(self) -> None:
        """Does nothing, as `offload`."""
