"""Worker that trains the policy, computes log-probabilities, and exports weights to the rollout."""

import socket
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from flowrl.algorithms.advantages.token_baselines import sum_squared_probs
from flowrl.config import ActorConfig, ModelConfig, PreferenceActorConfig, StudentConfig, TrainedConfig
from flowrl.controller.worker import Arguments, Contract, Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict, sum_tokens
from flowrl.data.dtypes import torch_dtype
from flowrl.devices.device import release_unused_memory
from flowrl.engines.models.loading import LanguageModel
from flowrl.engines.models.routing import ROUTES
from flowrl.engines.models.weight_samples import WeightSamples
from flowrl.engines.models.weights import to_arrays, weight_buckets
from flowrl.engines.rollout.broadcast import BroadcastSender, TransferGroup
from flowrl.engines.rollout.cuda_ipc import IpcBucket, IpcSender
from flowrl.engines.rollout.weight_metadata import WeightMetadata
from flowrl.engines.train.base import AdapterExport, Outputs, PartExport, SharedModel, TrainEngine
from flowrl.workers.losses.configured_losses import LANGUAGE_MODELING, distillation_loss, policy_loss
from flowrl.workers.losses.loss import Loss
from flowrl.workers.losses.preference_losses import preference_loss
from flowrl.workers.model_worker import TrainedWorker

if TYPE_CHECKING:
    from flowrl.workers.groups import ActorGroup


def add_entropies(contract: Contract, cls: type[Worker], arguments: Arguments, settings: object) -> Contract:
    """Returns the contract of `logprobs`, for `register(resolve=...)`. With `entropy`, the call also writes
    `entropies`.
    """
    return replace(contract, writes=("logprobs", "entropies")) if arguments.get("entropy", False) else contract


def policy_columns(
    engine: TrainEngine, batch: TensorDict, temperature: float, *, entropy: bool = False, without_adapter: bool = False
) -> TensorDict:
    """Returns a batch with the column `logprobs`. With `entropy`, it also has the column `entropies`.

    Args:
        engine: engine of a policy.
        batch: rows. If the batch has the column `response_mask`, the results are 0 outside of this mask.
        temperature: divisor of the logits.
        entropy: whether to compute entropies.
        without_adapter: whether to disable the adapter of the model.
    """
    outputs = Outputs(
        ("logprobs", "entropy") if entropy else ("logprobs",),
        "response_mask" if "response_mask" in batch["tokens"].keys() else None,  # noqa: SIM118 (a TensorDict)
        temperature,
        detached=("entropy",),
        without_adapter=without_adapter,
    )
    values = engine.forward(batch, outputs)
    columns = {"logprobs": values["logprobs"]} | ({"entropies": values["entropy"]} if entropy else {})
    return make_tensordict(tokens=columns, lengths=lengths(batch))


class Actor(TrainedWorker["ActorGroup"]):
    """Worker that trains a causal language model.

    Methods with `bucket_mb` and `dtype` split the weights into buckets of at most `bucket_mb` MB (10^6 bytes). They
    cast floating-point weights to `dtype`; None keeps the dtype.

    The settings select the loss: the policy loss of an `ActorConfig`, the preference loss of a `PreferenceActorConfig`,
    or the distillation loss of a `StudentConfig`. With other settings, the loss is the cross-entropy of the response
    tokens.
    """

    KIND = "policy"
    COMPUTED = ("logprobs", "entropy", "hidden", "topk_logprobs", "topk_ids")
    READS_IF_PRESENT = (ROUTES,)

    def __init__(self, config: TrainedConfig) -> None:
        super().__init__(config)
        self.temperature = (isinstance(config, ActorConfig | StudentConfig) and config.temperature) or 1.0
        self._known_buckets: dict[tuple[float, str | None], list[list[str]]] = {}

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("input_ids", "response_mask?", f"{ROUTES}?"),
        writes=("logprobs",),
        balance="tokens",
        resolve=add_entropies,
    )
    def logprobs(self, batch: TensorDict, entropy: bool = False) -> TensorDict:
        """Returns the log-probability `[T]` of each token under the current weights.

        If the batch has the column `response_mask`, the result is 0 for tokens outside of the mask. With `entropy`, the
        column `entropies` `[T]` has the entropy of the distribution of each token, in nats.
        """
        return policy_columns(self.engine, batch, self.temperature, entropy=entropy)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("input_ids", "response_mask", f"{ROUTES}?"),
        writes=("sum_squared_probs",),
        balance="tokens",
    )
    def sum_squared_probs(self, batch: TensorDict) -> TensorDict:
        """Returns the sum over the vocabulary of the squared probabilities of each token's distribution, `[T]`.

        Requires two forward passes. The result is 0 outside of `response_mask`.
        """
        temperatures = (self.temperature, self.temperature / 2)
        logprobs, sharp = (policy_columns(self.engine, batch, t)["tokens", "logprobs"][None] for t in temperatures)
        sums_1T = sum_squared_probs(logprobs, sharp, batch["tokens", "response_mask"][None])
        return make_tensordict(tokens={"sum_squared_probs": sums_1T[0]}, lengths=lengths(batch))

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("input_ids", "response_mask", f"{ROUTES}?"),
        writes=("response_logprobs",),
        balance="tokens",
    )
    def response_logprobs(self, batch: TensorDict) -> TensorDict:
        """Returns the log-probability of each row's response, `[B]`, summed over the tokens of `response_mask`."""
        columns = policy_columns(self.engine, batch, self.temperature)
        sums_B = sum_tokens(columns["tokens", "logprobs"], batch["tokens", "response_mask"], lengths(batch))
        return make_tensordict({"response_logprobs": sums_B})

    @classmethod
    def configured_loss(cls, config: TrainedConfig, *_: Any, **__: Any) -> Loss:  # Any: the constructor's
        if isinstance(config, ActorConfig):
            return policy_loss(config)
        if isinstance(config, StudentConfig):
            return distillation_loss(config)
        return preference_loss(config) if isinstance(config, PreferenceActorConfig) else LANGUAGE_MODELING

    @classmethod
    def shares_model(cls, config: TrainedConfig, *_: Any, **__: Any) -> bool:  # Any: the constructor's
        return config.engine.capabilities.shares_weights

    @property
    def shared_model(self) -> SharedModel | None:
        """The engine, if other workers in this process can use its model. Otherwise, None."""
        if not self.engine.capabilities.shares_weights:
            return None
        assert isinstance(self.engine, SharedModel), "an engine that shares weights has the methods of SharedModel"
        return self.engine

    @property
    def language_model(self) -> LanguageModel:
        """The model, which other workers in this process use."""
        assert self.shared_model is not None, "can_share_weights is true"
        return self.shared_model.language_model

    def can_share_weights(self, other: Worker) -> bool:
        """Returns whether the worker `other` can use this model's weights. For a sharded model, the ranks of both roles
        must be aligned.
        """
        shared = self.shared_model
        return shared is not None and (not shared.is_sharded or other.context.role in self.context.aligned_roles)

    @property
    def has_gathered_weights(self) -> bool:
        """Whether each call of the rollout must first gather sharded weights, or merge an adapter into the weights."""
        return (self.shared_model is not None and self.shared_model.is_sharded) or self.config.lora is not None

    def can_replace_reference(self, model: ModelConfig, reference: Worker) -> bool:
        """Returns whether this model with a disabled adapter can replace `model`, the model of a reference in this
        process.
        """
        shared = self.shared_model
        return (
            shared is not None
            and self.config.has_base(model)
            # All ranks must run a collective forward pass at the same time.
            and (
                not shared.has_collective_forward
                or (reference.mesh == self.mesh and reference.context.role in self.context.aligned_roles)
            )
        )

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
        weights = self.engine.export_weights(names, _dtype(dtype))
        arrays = to_arrays(weights, is_receiver=self.rank == 0, snapshot=False)
        self.context.add_usage(weight_bytes=sum(array.nbytes for array in arrays.values()))
        return arrays

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def adapter(self) -> dict[str, Any]:  # Any: as in `weights`
        """Returns the current weights of the LoRA adapter on rank 0, with the weights of `modules_to_save`."""
        assert isinstance(self.engine, AdapterExport), "an engine with the capability adapters"
        arrays = to_arrays(self.engine.export_adapter(), is_receiver=self.rank == 0, snapshot=False)
        self.context.add_usage(weight_bytes=sum(array.nbytes for array in arrays.values()))
        return arrays

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def weight_samples(
        self, version: int, subset: int = 0, num_subsets: int | None = None, dtype: str | None = None
    ) -> WeightSamples:
        """Returns samples of the actor's weights. The rollout compares them with its weights of `version`.

        With `num_subsets`, returns complete weights instead of samples: every `num_subsets`-th weight, starting at
        `subset`.
        """
        return self.engine.weight_samples(version, subset=subset, num_subsets=num_subsets, dtype=_dtype(dtype))

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def describe_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None) -> WeightMetadata:
        """Returns names, dtypes and shapes of the weights in a bucket. The receivers of a broadcast need this
        metadata.
        """
        names = set(self._buckets(bucket_mb, dtype)[bucket])
        return WeightMetadata.of(shape for shape in self.engine.weight_shapes(_dtype(dtype)) if shape[0] in names)

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=("weights",))
    def begin_sharing(self) -> None:
        """Releases the device memory of this process except for its weights, so that the rollout's weights also fit on
        the device.
        """
        self.offload(keep_weights=True)
        release_unused_memory()

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def share_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None, after: object = None) -> IpcBucket:
        """Copies a bucket into this GPU's IPC buffer and returns the IPC handle. The next call overwrites the bucket.

        `after` is a future that delays this call until the rollout has read the previous bucket. `begin_sharing` must
        run first, because it keeps the weights on the device.
        """
        metadata = self.describe_weights(bucket, bucket_mb, dtype)
        self.context.add_usage(weight_bytes=sum(metadata.sizes))
        return self._ipc.share(self.engine.export_weights(metadata.names, _dtype(dtype)), metadata)

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def release_weights(self, after: object = None) -> None:
        """Returns the memory of the IPC buffer to the GPU."""
        self._ipc.release()

    @register(Dispatch.RANK_ZERO, memory=())
    def open_transfer_group(self, num_receivers: int, all_send: bool) -> TransferGroup:
        """Returns the rendezvous of a broadcast to `num_receivers` devices. With `all_send`, each rank that can export
        a part of the weights sends its part. Otherwise, rank 0 sends all weights.

        Listens on the port until `join_transfer_group`, so that no other process can take the port.
        """
        self._listener: socket.socket | None = socket.create_server((self.context.address, 0))
        num_senders = self.engine.weight_part[1] if all_send and isinstance(self.engine, PartExport) else 1
        return TransferGroup(self.context.address, self._listener.getsockname()[1], num_senders, num_receivers)

    @register(Dispatch.ALL_TO_ONE, blocking=False, memory=())
    def join_transfer_group(self, group: TransferGroup) -> None:
        """Joins a broadcast if this rank sends. Waits until all receivers have joined."""
        index: int | None = None if self.rank else 0
        if group.num_senders > 1:
            assert isinstance(self.engine, PartExport), "several ranks send parts"
            index, _ = self.engine.weight_part
        listener, self._listener = (self._listener, None) if self.rank == 0 else (None, None)
        device = torch.device(self.device)
        self._sender = None if index is None else BroadcastSender(group, index, device, listener)
        self._num_senders = group.num_senders

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def broadcast_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None) -> None:
        """Broadcasts a bucket. If only rank 0 sends, all other ranks take part in the all-gathers."""
        metadata = self.describe_weights(bucket, bucket_mb, dtype)
        self.context.add_usage(weight_bytes=sum(metadata.sizes))
        if self._num_senders > 1:
            if self._sender is not None:
                assert isinstance(self.engine, PartExport), "several ranks send parts"
                self._sender.send(self.engine.export_part(metadata.names, _dtype(dtype)), metadata)
            return
        weights = (weight for _, weight in self.engine.export_weights(metadata.names, _dtype(dtype)))
        if self._sender is not None:
            self._sender.send(weights, metadata)
        else:
            for _ in weights:
                pass

    def _buckets(self, bucket_mb: float, dtype: str | None) -> list[list[str]]:
        key = (bucket_mb, dtype)
        if key not in self._known_buckets:
            self._known_buckets[key] = weight_buckets(self.engine.weight_shapes(_dtype(dtype)), bucket_mb * 1e6)
        return self._known_buckets[key]

    @cached_property
    def _ipc(self) -> IpcSender:
        return IpcSender(torch.device(self.device))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else torch_dtype(name)
