"""Base classes of workers with a model. They provide the process groups, the offload of idle models, training with any
loss, and checkpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDict
from torch import Tensor, nn

from flowrl.config import (
    EngineConfig,
    ModelRoleConfig,
    UserError,
    shards_model,
)
from flowrl.controller.errors import ContractError
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Arguments, Contract, Dispatch, GroupType, Worker, register
from flowrl.data.batch.batch import Batch
from flowrl.data.checksums import Saved
from flowrl.data.metric import Metric, merge_metrics
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.checkpoint.export import describe_export
from flowrl.engines.models.loading import TrainedModel, save_model
from flowrl.engines.parallel.rank_mesh import RankMesh, rank_mesh
from flowrl.engines.train.engine import TrainEngine
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.losses.loss import Loss, LossFunction, accumulate_loss, check_weight, measure_loss


def build_rank_mesh(worker: Worker, engine: EngineConfig) -> RankMesh:
    """Creates the process groups of a worker's role. All ranks of the role must call this together."""
    return rank_mesh(
        worker.context.process_group,
        device=worker.device,
        tp=worker.mesh.tp,
        sp=worker.mesh.sp,
        shard_ranks=worker.mesh.shard_ranks(engine.shard_ranks),
    )


def has_collective_forward(mesh: Mesh, engine: EngineConfig) -> bool:
    """Returns whether the ranks must run a forward pass together, because of sharded weights or sequence parallelism.

    True for sharded weights on one rank, because FSDP2 needs a process group.
    """
    return mesh.sp > 1 or shards_model(engine, mesh.tp)


class ModelWorker(Worker[GroupType]):
    """Worker with a `TrainEngine`. The constructor of the subclass must store it as `engine`."""

    engine: TrainEngine

    @classmethod
    def needs_process_group(
        cls, mesh: Mesh, config: ModelRoleConfig, *_: Any, **__: Any
    ) -> bool:  # Any: the constructor's
        return cls.collective and (mesh.size > 1 or shards_model(config.engine, mesh.tp))

    @classmethod
    def can_offload_device(
        cls, device: str, config: ModelRoleConfig, *_: Any, **__: Any
    ) -> bool:  # Any: the constructor's
        return config.engine.offload == "idle"

    def pop_usage(self) -> dict[str, float]:
        return super().pop_usage() | self.engine.pop_usage()

    def offload(self, *, keep_weights: bool) -> None:
        if self.engine.offloads_when_idle:
            self.engine.offload(keep_weights=keep_weights)

    def onload(self) -> None:
        if self.engine.offloads_when_idle:
            self.engine.onload()


def resolve_loss(
    contract: Contract, cls: "type[TrainedWorker]", arguments: Arguments, *args: Any, **kwargs: Any
) -> Contract:
    """Returns the contract of a call with a loss, for `register(resolve=...)`. Its columns and groups are those of the
    loss.

    Args:
        contract: contract of the method. The columns in its `reads` are sent in addition.
        cls: worker class.
        arguments: arguments of the call.
        args, kwargs: arguments of the constructor.
    Raises ContractError if the batch lacks a column that the loss reads, or the weight is not a number.
    """
    loss, batch = arguments.get("loss"), arguments["batch"]
    if not isinstance(batch, Batch):
        raise ContractError(f"the batch of a loss is a {type(batch).__name__}: pass a Batch")
    try:
        check_weight(arguments.get("weight", 1.0))
        loss = cls.configured_loss(*args, **kwargs) if loss is None else Loss.of(loss)
        columns = loss.read_columns(batch.columns, cls.COMPUTED, cls.__name__)
    except UserError as error:
        raise ContractError(str(error)) from None
    others = contract.reads if isinstance(contract.reads, tuple) else ()
    return replace(contract, reads=tuple(dict.fromkeys([*columns, *others])), groups=loss.group)


class TrainedWorker(ModelWorker[GroupType]):
    """Worker whose model is trained and saved in checkpoints.

    Subclasses define the inputs that they compute for a loss, and the loss that their settings select.
    """

    collective = True

    COMPUTED: ClassVar[tuple[str, ...]]
    """Inputs of a loss that `compute_inputs` returns."""

    config: Any  # Any: the config class of the role
    model: TrainedModel

    @classmethod
    def configured_loss(cls, config: Any, *_: Any, **__: Any) -> Loss:  # Any: the constructor's
        """Returns the loss that the settings of the role select."""
        raise NotImplementedError

    def compute_inputs(self, model: nn.Module, micro: MicroBatch, mask_BL: Tensor, loss: Loss) -> Mapping[str, Tensor]:
        """Returns the inputs of the loss that the model computes. They are 0 where the mask is false, so that no
        gradient flows through other tokens.
        """
        raise NotImplementedError

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, balance="tokens", resolve=resolve_loss)
    def forward_backward(
        self, batch: TensorDict, loss: Loss | LossFunction | None = None, weight: float = 1.0
    ) -> dict[str, Metric]:
        """Adds the gradient of `weight` times a loss to the gradient of the next `optim_step`. Returns metrics.

        Args:
            batch: rows, with the columns that the loss reads.
            loss: a loss, or a function for `Loss(function)`. None is the loss that the settings select.
            weight: weight of the loss in the step.
        """
        loss = self._choose(loss)
        return _with_prefix(self._prefix(loss), self._accumulate(batch, loss, weight))

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def optim_step(self) -> dict[str, Metric]:
        """Takes an optimizer step on the sum of the gradients since the last step. Returns `grad_norm`, `lr` and
        `skipped_update`.
        """
        return _with_prefix(f"{self.context.role}/", self.engine.optim_step())

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, balance="tokens", resolve=resolve_loss)
    def update(
        self, batch: TensorDict, loss: Loss | LossFunction | None = None, weight: float = 1.0
    ) -> dict[str, Metric]:
        """Takes one optimizer step on a loss: `forward_backward` and then `optim_step`. Returns the metrics of both.

        The step includes the gradients of earlier calls of `forward_backward`.
        """
        metrics = self.forward_backward(batch, loss, weight)
        return merge_metrics([metrics, self.optim_step()])

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, balance="tokens", resolve=resolve_loss)
    def measure(self, batch: TensorDict, loss: Loss | LossFunction | None = None) -> dict[str, Metric]:
        """Returns the metrics of a loss, as `forward_backward` does, without training."""
        loss = self._choose(loss)
        return _with_prefix(self._prefix(loss), measure_loss(self.engine, batch, loss, self.compute_inputs))

    def _choose(self, loss: Loss | LossFunction | None) -> Loss:
        return self.configured_loss(self.config) if loss is None else Loss.of(loss)

    def _prefix(self, loss: Loss) -> str:
        return f"{self.context.role}/{loss.label}/" if loss.label else f"{self.context.role}/"

    def _accumulate(self, batch: TensorDict, loss: Loss, weight: float) -> dict[str, Metric]:
        return accumulate_loss(self.engine, batch, loss, self.compute_inputs, weight)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> None:
        """Writes the training state to an empty folder. With `asynchronous`, a background thread writes the files."""
        self._checkpoints.save(folder, asynchronous=asynchronous, extra_files=self.description())

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def checkpoint_saved(self, wait: bool = True) -> Saved | None:
        """Returns the files that this rank wrote. Without `wait`, returns None while a rank is still writing."""
        return self._checkpoints.result(wait=wait)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: Path) -> None:
        """Restores the training state from a folder that any number of ranks wrote."""
        load(self.engine, folder)

    @register(Dispatch.ALL_TO_ONE)
    def save(self, folder: Path) -> None:
        """Saves the model and its tokenizer in the format of `save_pretrained`. A reward model becomes a sequence
        classifier with one label. The value head of a critic is a separate file, `value_head.safetensors`.
        """
        save_model(self.model, self.config.model.tokenizer_path, folder, is_writer=self.rank == 0)

    def description(self) -> dict[str, bytes]:
        """Returns the files that `flowrl export` needs besides the weights, as name -> contents."""
        return self._description if self.rank == 0 else {}

    @cached_property
    def _description(self) -> dict[str, bytes]:
        return describe_export(self.model, self.config.model, self.config.lora)

    @cached_property
    def _checkpoints(self) -> EngineCheckpoints:
        return EngineCheckpoints(self.engine)


def _with_prefix(prefix: str, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    return {f"{prefix}{name}": metric for name, metric in metrics.items()}
