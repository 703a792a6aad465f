"""Base classes of workers with a model. They provide the process groups, the offload of idle models, training with any
loss, and checkpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from flowrl.config import (
    EngineConfig,
    ExportConfig,
    ModelConfig,
    ModelKind,
    ModelRoleConfig,
    RewardModelConfig,
    ScoringModelConfig,
    UserError,
    shards_model,
)
from flowrl.config.engines.train_engines import DEFAULT_TRAIN_ENGINE
from flowrl.controller.errors import ContractError
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Arguments, Contract, Dispatch, GroupType, Worker, register
from flowrl.data.batch.batch import Batch
from flowrl.data.checksums import Saved
from flowrl.data.metric import Metric, merge_metrics
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.checkpoint.export import describe_export
from flowrl.engines.checkpoint.model_folder import (
    DEFAULT_EXPORT,
    export_dtype,
    gathered_by_all,
    in_file_order,
    write_model,
)
from flowrl.engines.models.loading import find_differences
from flowrl.engines.models.partial_loading import WeightDifferences
from flowrl.engines.train.base import TrainContext, TrainEngine, load_train_engine_class
from flowrl.workers.losses.loss import BoundLoss, Loss, LossFunction, check_weight


def start_engine(worker: "ModelWorker", kind: ModelKind, config: ModelRoleConfig) -> TrainEngine:
    """Starts the training engine of a worker. All ranks of the role must call this together.

    Args:
        worker: the worker, whose role, device and process group the engine uses.
        kind: kind of the model.
        config: settings of the role.
    """
    mesh, worker.offloads_when_idle = worker.mesh, config.engine.offload == "idle"
    worker.loaded = kind, config
    context = TrainContext(
        kind,
        config,
        torch.device(worker.device),
        worker.context.process_group,
        pp=mesh.pp,
        sp=mesh.sp,
        tp=mesh.tp,
        shard_ranks=mesh.shard_ranks(config.engine.shard_ranks),
    )
    return load_train_engine_class(config.engine.kind, pp=mesh.pp).start(context)


def has_collective_forward(mesh: Mesh, engine: EngineConfig) -> bool:
    """Returns whether the ranks must run a forward pass together, because they share weights or rows.

    True for sharded weights on one rank, because FSDP2 needs a process group, and for a user's engine on several ranks.
    """
    if engine.kind != DEFAULT_TRAIN_ENGINE:
        return mesh.size > 1
    return mesh.sp > 1 or mesh.pp > 1 or shards_model(engine, mesh.tp)


def model_differences(kind: ModelKind, model: ModelConfig | None, *, has_fresh_head: bool = False) -> WeightDifferences:
    """Returns the differences between a model and its files. They are empty with `model.strict: true`."""
    if model is None or model.strict:
        return WeightDifferences()
    return find_differences(kind, model, has_fresh_head=has_fresh_head)


class ModelWorker(Worker[GroupType]):
    """Worker with a training engine. The constructor of the subclass must store it as `engine`."""

    engine: TrainEngine
    offloads_when_idle = False
    """Whether the engine moves its state to the CPU while other roles use its device."""
    loaded: tuple[ModelKind, ModelRoleConfig] | None = None
    """Kind and settings of the model that `start_engine` has loaded. None if the worker uses another role's model."""

    @register(Dispatch.RANK_ZERO, memory=())
    def weight_differences(self) -> WeightDifferences:
        """Returns the names of missing and unexpected weights in the model's files. Empty with `model.strict: true`."""
        if self.loaded is None:
            return WeightDifferences()
        kind, config = self.loaded
        has_head = isinstance(config, ScoringModelConfig | RewardModelConfig)
        return model_differences(kind, config.model, has_fresh_head=has_head and config.head == "fresh")

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
        if self.offloads_when_idle:
            self.engine.offload(keep_weights=keep_weights)

    def onload(self) -> None:
        if self.offloads_when_idle:
            self.engine.onload()


class LossSettings:
    """Facts about a role on which its calls with a loss depend. They are computed once per group and per worker."""

    def __init__(self, cls: "type[TrainedWorker]", config: Any) -> None:  # Any: the config class of the role
        self._cls, self._config = cls, config

    @cached_property
    def configured(self) -> Loss:
        """Loss that the settings of the role select."""
        return self._cls.configured_loss(self._config)

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """Inputs of a loss that the engine of the role computes."""
        known = self._config.engine.capabilities.outputs
        return tuple(name for name in self._cls.COMPUTED if name in known)


def resolve_loss(
    contract: Contract, cls: "type[TrainedWorker]", arguments: Arguments, settings: LossSettings
) -> Contract:
    """Returns the contract of a call with a loss, for `register(resolve=...)`. Its columns and groups are those of the
    loss.

    Args:
        contract: contract of the method. The columns in its `reads` are sent in addition.
        cls: worker class.
        arguments: arguments of the call.
        settings: the loss of the role's settings, and the outputs of its engine.
    Raises ContractError if the batch lacks a column that the loss reads, or the weight is not a number.
    """
    loss, batch = arguments.get("loss"), arguments["batch"]
    if not isinstance(batch, Batch):
        raise ContractError(f"the batch of a loss is a {type(batch).__name__}: pass a Batch")
    try:
        check_weight(arguments.get("weight", 1.0))
        loss = settings.configured if loss is None else Loss.of(loss)
        columns = loss.read_columns(batch.columns, settings.computed, cls.__name__)
    except UserError as error:
        raise ContractError(str(error)) from None
    others = contract.reads if isinstance(contract.reads, tuple) else ()
    others += tuple(name for name in cls.READS_IF_PRESENT if name in batch.columns)
    return replace(contract, reads=tuple(dict.fromkeys([*columns, *others])), groups=loss.group)


class TrainedWorker(ModelWorker[GroupType]):
    """Worker whose model is trained and saved in checkpoints.

    Subclasses define the outputs that a loss may read, and the loss that their settings select.
    """

    collective = True

    KIND: ClassVar[ModelKind]
    """Kind of the model."""

    COMPUTED: ClassVar[tuple[str, ...]]
    """Outputs of the model that a loss may read (`flowrl.engines.train.base.Outputs`)."""

    READS_IF_PRESENT: ClassVar[tuple[str, ...]] = ()
    """Columns that a call with a loss reads besides those of the loss, if the batch has them."""

    temperature = 1.0
    """Divisor of the logits."""

    config: Any  # Any: the config class of the role

    def __init__(self, config: Any) -> None:  # Any: as above
        self.config = config
        self.engine = start_engine(self, self.KIND, config)
        self._settings = self.call_settings(config)
        self._bound: dict[tuple[tuple[str, torch.dtype], ...], BoundLoss] = {}
        """The loss of the settings, bound to the token columns of a batch."""

    @classmethod
    def configured_loss(cls, config: Any) -> Loss:  # Any: as above
        """Returns the loss that the settings of the role select."""
        raise NotImplementedError

    @classmethod
    def call_settings(cls, config: Any, *_: Any, **__: Any) -> LossSettings:  # Any: the constructor's
        return LossSettings(cls, config)

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
        return self._add_gradient(batch, loss, weight, is_last=False)

    def _add_gradient(
        self, batch: TensorDict, loss: Loss | LossFunction | None, weight: float, *, is_last: bool
    ) -> dict[str, Metric]:
        bound = self._bind(batch, loss)
        groups = bound.loss.row_groups
        metrics = self.engine.forward_backward(
            batch, bound, bound.outputs, groups=groups, weight=weight, is_last=is_last
        )
        return _with_prefix(self._prefix(bound.loss), metrics)

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
        metrics = self._add_gradient(batch, loss, weight, is_last=True)
        return merge_metrics([metrics, self.optim_step()])

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, balance="tokens", resolve=resolve_loss)
    def measure(self, batch: TensorDict, loss: Loss | LossFunction | None = None) -> dict[str, Metric]:
        """Returns the metrics of a loss, as `forward_backward` does, without training."""
        bound = self._bind(batch, loss)
        metrics = self.engine.measure(batch, bound, bound.outputs, groups=bound.loss.row_groups)
        return _with_prefix(self._prefix(bound.loss), metrics)

    def _bind(self, batch: TensorDict, loss: Loss | LossFunction | None) -> BoundLoss:
        columns = {name: column.dtype for name, column in batch["tokens"].items()}
        if loss is not None:
            return BoundLoss.of(Loss.of(loss), columns, self._settings.computed, self.temperature)
        key = tuple(columns.items())
        if key not in self._bound:
            configured, computed = self._settings.configured, self._settings.computed
            self._bound[key] = BoundLoss.of(configured, columns, computed, self.temperature)
        return self._bound[key]

    def _prefix(self, loss: Loss) -> str:
        return f"{self.context.role}/{loss.label}/" if loss.label else f"{self.context.role}/"

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
    def save(self, folder: Path, config: ExportConfig = DEFAULT_EXPORT) -> None:
        """Saves the model and its tokenizer in the format of `save_pretrained`. A critic and a reward model become
        sequence classifiers with one label. Rank 0 gathers one weight at a time.
        """
        dtype = export_dtype(config)
        shapes = in_file_order(self.engine.weight_shapes(dtype))
        with gathered_by_all(self.engine.export_weights([name for name, _, _ in shapes], dtype)) as weights:
            if self.rank == 0:
                files, tokenizer = self.engine.describe_model(), self.config.model.tokenizer_path
                write_model(self.KIND, files, shapes, weights, tokenizer, folder, config)

    def description(self) -> dict[str, bytes]:
        """Returns the files that `flowrl export` needs besides the weights, as name -> contents."""
        return self._description if self.rank == 0 else {}

    @cached_property
    def _description(self) -> dict[str, bytes]:
        return describe_export(self.engine.describe_model(), self.config.model, self.config.lora)

    @cached_property
    def _checkpoints(self) -> EngineCheckpoints:
        return EngineCheckpoints(self.engine)


def _with_prefix(prefix: str, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    return {f"{prefix}{name}": metric for name, metric in metrics.items()}
