"""Worker that trains the policy, computes log-probabilities, and exports weights to the rollout."""

import socket
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import nn

from flowrl.algorithms import aggregate, kl_loss, masked_range
from flowrl.algorithms.registry import (
    aggregation_modes,
    kl_kinds,
    loss_and_metrics,
    per_token,
    policy_losses,
    scalar,
)
from flowrl.config import ActorConfig, ModelConfig, UserError
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.data.dtypes import torch_dtype
from flowrl.data.metric import Max, Mean, Metric, Min
from flowrl.engines.checkpoint.export import DESCRIPTION, describe_adapter
from flowrl.engines.models.loading import describe_model, load_policy, save_model
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.models.weights import export_weights, full_weights, weight_buckets, weight_shapes
from flowrl.engines.rollout.weight_check import WeightSamples, weight_samples
from flowrl.engines.train.engine import Denominators, TrainEngine, is_sharded
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.model_worker import TrainedWorker, build_rank_mesh
from flowrl.workers.policy_model import PolicyModel, policy_logprobs

if TYPE_CHECKING:
    from flowrl.engines.rollout.vllm.gpu_transfer import IpcBucket, IpcSender, WeightMetadata


class Actor(TrainedWorker):
    """Worker that trains a causal language model.

    Methods with `bucket_mb` and `dtype` split the weights into buckets of at most `bucket_mb` MB (10^6 bytes). They
    cast floating-point weights to `dtype`; None keeps the dtype.

    Args:
        config: model, optimizer and loss.
        temperature: sampling temperature of the rollout. The logits are divided by it before the log-softmax.
    """

    def __init__(self, config: ActorConfig, *, temperature: float = 1.0) -> None:
        self.config, self.temperature = config, temperature
        self._loss = policy_losses.load(config.loss.kind)
        mesh = build_rank_mesh(self, config.engine)
        self.model = load_policy(config.model, on_meta=is_sharded(config.engine, mesh))
        if config.lora is not None:
            add_adapter(self.model, config.lora)
        self.engine = TrainEngine(
            PolicyModel(self.model),
            config.optimizer,
            config.engine,
            mesh=mesh,
            device=torch.device(self.device),
        )
        self._described: dict[str, bytes] = {}
        self._known_buckets: dict[tuple[float, str | None], list[list[str]]] = {}

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("logprobs",))
    def logprobs(self, batch: TensorDict) -> TensorDict:
        """Returns the log-probability `[T]` of every token under the current weights."""
        values_T = self.engine.evaluate(batch, partial(policy_logprobs, temperature=self.temperature))
        return make_tensordict(tokens={"logprobs": values_T}, lengths=lengths(batch))

    @register(
        Dispatch.DP_COMPUTE_METRIC,
        blocking=False,
        reads=(
            "input_ids",
            "response_mask",
            "old_logprobs",
            "advantages",
            "ref_logprobs?",
            "behavior_logprobs?",
            "selected?",
            "loss_weights?",
            "loss_mask?",
        ),
    )
    def update(self, batch: TensorDict) -> dict[str, Metric]:
        """Takes one optimizer step on the policy loss, entropy bonus and KL loss. Returns metrics.

        A rollout correction adds two optional columns. `loss_weights` multiplies the policy loss. `loss_mask` replaces
        the response mask.
        """
        self._check_columns(batch)
        columns = batch["tokens"].keys()
        mask_column = "loss_mask" if "loss_mask" in columns else "response_mask"

        def loss(
            model: nn.Module, micro: MicroBatch, denominators: Denominators
        ) -> tuple[torch.Tensor, dict[str, Metric]]:
            return self._policy_loss(model, micro, denominators, mask_column)

        metrics = self.engine.update(batch, loss, mask_column)
        return {f"{self.context.role}/{name}": metric for name, metric in metrics.items()}

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("input_ids", "response_mask"))
    def update_sft(self, batch: TensorDict) -> dict[str, Metric]:
        """Takes one optimizer step on the mean cross-entropy of the response tokens. Returns metrics."""
        return self.engine.update(batch, _sft_loss)

    @register(Dispatch.ALL_TO_ONE)
    def save(self, folder: Path) -> None:
        """Saves model and tokenizer in the format of `save_pretrained`."""
        save_model(self.model, self.config.model.path, folder, is_writer=self.rank == 0)

    def can_share_weights(self, other: Worker) -> bool:
        """Returns whether the worker `other` can use this model's weights. For a sharded model, the ranks of both roles
        must be aligned.
        """
        return not self.engine.is_sharded or other.context.role in self.context.aligned_roles

    @property
    def has_gathered_weights(self) -> bool:
        """Whether each call of the rollout must first gather sharded weights, or merge an adapter into the weights."""
        return self.engine.is_sharded or self.config.lora is not None

    def can_replace_reference(self, model: ModelConfig, reference: Worker) -> bool:
        """Returns whether this model, with its adapter disabled, can replace a reference worker in this process."""
        is_collective = self.engine.is_sharded or self.engine.mesh.sequence is not None
        return (
            self.config.lora is not None
            and model == self.config.model
            # All ranks of a collective forward pass must call it at the same time.
            and (
                not is_collective
                or (reference.mesh == self.mesh and reference.context.role in self.context.aligned_roles)
            )
        )

    def description(self) -> dict[str, bytes]:
        """Returns the model's configuration and tokenizer files, as name -> contents. `flowrl export` needs these
        files.
        """
        if not self._described and self.rank == 0:
            files = describe_model(self.model, self.config.model.path)
            if self.config.lora is not None:
                files |= describe_adapter(self.config.model, self.config.lora)
            self._described = {f"{DESCRIPTION}/{name}": data for name, data in files.items()}
        return self._described

    # Weight export. `WeightSync` calls these methods; see docs/weight_transfer.md.

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def num_buckets(self, bucket_mb: float, dtype: str | None = None) -> int:
        """Returns the number of buckets of one weight sync."""
        return len(self._buckets(bucket_mb, dtype))

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def weights(
        self, bucket: int = 0, bucket_mb: float | None = None, dtype: str | None = None
    ) -> dict[str, Any]:  # Any: NumPy arrays, see engines/models/weights.py
        """Returns a bucket of the current weights on rank 0. If `bucket_mb` is None, returns all weights."""
        names = None if bucket_mb is None else self._buckets(bucket_mb, dtype)[bucket]
        # No snapshot, because the controller copies the result of a call.
        return export_weights(self.model, names, dtype=_dtype(dtype), is_receiver=self.rank == 0, snapshot=False)

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def weight_samples(
        self, version: int, subset: int = 0, num_subsets: int | None = None, dtype: str | None = None
    ) -> WeightSamples:
        """Returns samples of the actor's weights. The rollout compares them with its weights of `version`.

        With `num_subsets`, returns all columns of every `num_subsets`-th weight instead, starting at weight `subset`.
        """
        return weight_samples(
            self.model, version, subset=subset, num_subsets=num_subsets, dtype=_dtype(dtype), is_receiver=self.rank == 0
        )

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def describe_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None) -> "WeightMetadata":
        """Returns names, dtypes and shapes of the weights in a bucket. The receivers of a broadcast need this
        metadata.
        """
        from flowrl.engines.rollout.vllm.gpu_transfer import WeightMetadata  # noqa: PLC0415 (vLLM is optional)

        return WeightMetadata.of(weight_shapes(self.model, self._buckets(bucket_mb, dtype)[bucket], _dtype(dtype)))

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def share_weights(
        self, bucket: int, bucket_mb: float, dtype: str | None = None, after: object = None
    ) -> "IpcBucket":
        """Copies a bucket into this GPU's IPC buffer and returns the IPC handle. The next call overwrites the bucket.

        `after` is a future that delays this call until the rollout has read the previous bucket.
        """
        metadata = self.describe_weights(bucket, bucket_mb, dtype)
        return self._ipc.share(full_weights(self.model, metadata.names, _dtype(dtype)), metadata.num_bytes)

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def release_weights(self, after: object = None) -> None:
        self._ipc.release()

    @register(Dispatch.RANK_ZERO, memory=())
    def open_transfer_group(self) -> tuple[str, int]:
        """Returns an address and a free port for the rendezvous of the NCCL transfer group."""
        with socket.create_server((self.context.address, 0)) as listener:
            return self.context.address, listener.getsockname()[1]

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def join_transfer_group(self, group: Mapping[str, Any]) -> None:  # Any: the fields of `TransferGroup`
        """Joins the NCCL transfer group. Blocks until all ranks have joined."""
        from flowrl.engines.rollout.vllm.gpu_transfer import NcclSender, TransferGroup  # noqa: PLC0415 (as above)

        self._nccl: NcclSender = NcclSender(TransferGroup(**group))

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def broadcast_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None) -> None:
        """Broadcasts a bucket from rank 0 to the transfer group. All other ranks only take part in the all-gathers."""
        weights = full_weights(self.model, self._buckets(bucket_mb, dtype)[bucket], _dtype(dtype))
        if self.rank == 0:
            self._nccl.send(weights)
        else:
            for _ in weights:
                pass

    def _buckets(self, bucket_mb: float, dtype: str | None) -> list[list[str]]:
        key = (bucket_mb, dtype)
        if key not in self._known_buckets:
            self._known_buckets[key] = weight_buckets(self.model, bucket_mb * 1e6, _dtype(dtype))
        return self._known_buckets[key]

    @cached_property
    def _ipc(self) -> "IpcSender":
        from flowrl.engines.rollout.vllm.gpu_transfer import IpcSender  # noqa: PLC0415 (as above)

        return IpcSender()

    # Loss.

    def _check_columns(self, batch: TensorDict) -> None:
        """Raises UserError if the batch lacks a column that the loss reads."""
        inputs = policy_losses.inputs(self._loss)
        required = {name: f"loss {self.config.loss.kind}" for name in policy_losses.keywords if name in inputs}
        if self.config.kl_loss_coef:
            required["ref_logprobs"] = "kl_loss_coef"
        for name, setting in required.items():
            if name not in batch["tokens"].keys():  # noqa: SIM118 (a TensorDict)
                source = "reference.logprobs" if name == "ref_logprobs" else "flowrl.run.advantages.Advantages"
                raise UserError(
                    f"actor.{setting} is set, but the batch has no column {name!r}: compute it before the update with "
                    f"{source}"
                )

    def _policy_loss(
        self, model: nn.Module, micro: MicroBatch, denominators: Denominators, mask_column: str
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        config, mask_BL = self.config, micro.tokens[mask_column]
        entropy = "gradient" if config.entropy_coef else "value"
        logprobs_BL, entropy_BL = model(micro.input_ids, mask_BL, self.temperature, entropy, pack=micro.pack)
        loss_BL, details = self._token_loss(logprobs_BL, micro, mask_BL)
        if "loss_weights" in micro.tokens:
            loss_BL = loss_BL * micro.tokens["loss_weights"]
        values = {"loss": loss_BL, "entropy": entropy_BL} | details
        if config.entropy_coef:
            loss_BL = loss_BL - config.entropy_coef * entropy_BL
        if config.kl_loss_coef:
            kl_BL, _ = kl_loss(
                logprobs_BL,
                micro.tokens["ref_logprobs"],
                mask_BL,
                kind=kl_kinds.load(config.kl_loss_kind),
                gradient=config.kl_loss_gradient,
            )
            kl_BL = per_token(kl_BL, mask_BL, f"actor.kl_loss_kind {config.kl_loss_kind}")
            loss_BL = loss_BL + config.kl_loss_coef * kl_BL
            values["kl_loss"] = kl_BL
        scale = {} if config.aggregation_scale is None else {"scale": config.aggregation_scale}
        loss = aggregation_modes.load(config.aggregation)(
            loss=loss_BL,
            mask=mask_BL,
            denominator=denominators.tokens if config.aggregation == "token_mean" else denominators.rows,
            **scale,
        )
        return scalar(loss, f"actor.aggregation {config.aggregation}"), token_means(values, mask_BL)

    def _token_loss(
        self, logprobs_BL: torch.Tensor, micro: MicroBatch, mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the policy loss per token `[B, L]` and its metrics."""
        columns = {"logprobs": logprobs_BL, "mask": mask_BL} | {
            name: micro.tokens[name] for name in policy_losses.inputs(self._loss) if name not in ("logprobs", "mask")
        }
        result = self._loss(**columns, **self.config.loss.arguments())
        return loss_and_metrics(result, mask_BL, f"actor.loss {self.config.loss.kind}")


def _sft_loss(
    model: nn.Module, micro: MicroBatch, denominators: Denominators
) -> tuple[torch.Tensor, dict[str, Metric]]:
    mask_BL = micro.tokens["response_mask"]
    loss_BL = -model(micro.input_ids, mask_BL, pack=micro.pack)[0]
    loss = aggregate(loss_BL, mask_BL, mode="token_mean", denominator=denominators.tokens)
    return loss, token_means({"loss": loss_BL}, mask_BL)


def token_means(values: dict[str, torch.Tensor], mask_BL: torch.Tensor) -> dict[str, Metric]:
    """Returns metrics: the masked mean of each value `[B, L]`, and the minimum and maximum of `ratio`."""
    sums = [value.detach().masked_fill(~mask_BL, 0).sum(dtype=torch.float64) for value in values.values()]
    extremes = masked_range(values["ratio"], mask_BL) if "ratio" in values else ()
    # One device synchronization for all metrics.
    count, *numbers = torch.stack([mask_BL.sum().double(), *sums, *(x.double() for x in extremes)]).tolist()
    metrics: dict[str, Metric] = {name: Mean(total, count) for name, total in zip(values, numbers, strict=False)}
    if extremes and count:
        metrics |= {"ratio_min": Min(numbers[-2]), "ratio_max": Max(numbers[-1])}
    return metrics


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else torch_dtype(name)
