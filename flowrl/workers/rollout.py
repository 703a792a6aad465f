"""Rollout worker, which generates responses with the actor's weights, for batches or for a stream of prompt groups."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.config import CheckFailed, ModelConfig, RolloutConfig
from flowrl.controller.worker import Contract, Dispatch, Worker, register
from flowrl.data.batch.tensordicts import make_tensordict, num_rows, objects
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.rollout.base import (
    TAGS,
    ActorWeights,
    BroadcastEngine,
    ColocatedEngine,
    EngineContext,
    EngineState,
    PromptError,
    Request,
    Response,
    RolloutEngine,
    RolloutError,
    SleepingEngine,
    StreamingEngine,
    load_engine_class,
)
from flowrl.engines.rollout.response_tensors import Responses, make_requests, stack_responses
from flowrl.engines.rollout.sampling import row_keys
from flowrl.engines.rollout.weight_check import Compared, WeightSamples, check_compared
from flowrl.workers.actor import Actor
from flowrl.workers.segments import (
    ENVIRONMENT_READS,
    Columns,
    Environment,
    environment_columns,
    generate_segments,
)

if TYPE_CHECKING:
    from flowrl.engines.rollout.vllm.gpu_transfer import IpcBucket, WeightMetadata
    from flowrl.workers.groups import RolloutGroup

RESPONSE_COLUMNS = ("input_ids", "response_mask", "rollout_logprobs", "weight_version", "truncated", "response")


def add_environment_columns(
    contract: Contract, cls: type[Worker], arguments: Any, config: RolloutConfig, *args: Any, **kwargs: Any
) -> Contract:  # Any: the arguments of the call and of the constructor
    """Returns the contract of a call that generates, for `register(resolve=...)`. An environment reads more columns."""
    assert isinstance(contract.reads, tuple)
    return contract if config.environment is None else replace(contract, reads=(*contract.reads, *ENVIRONMENT_READS))


class Rollout(Worker["RolloutGroup"]):
    """Worker that generates responses with the engine that `config.engine` selects.

    In the actor's process, an engine can share the actor's weights or copy them. In a separate process, it receives
    them in updates.

    Args:
        config: engine and sampling settings.
        model: initial model of the actor.
        seed: random seed. Random numbers depend only on seed, `prompt_id`, `sample` and token position.
    """

    replicated = stateless = True

    def __init__(self, config: RolloutConfig, model: ModelConfig, *, seed: int) -> None:
        self.seed, self._groups, self._max_num_seqs = seed, PromptGroups(), config.max_num_seqs
        actor = self.find_peer(Actor)
        self._actor = actor if actor is not None and actor.can_share_weights(self) else None
        self.shares_weights = self._actor is not None and config.can_share_weights
        """Whether the rollout generates with the actor's own weights."""
        weights = None if self._actor is None else ActorWeights(self._actor.model, self._actor.has_gathered_weights)
        self.tokenizer = ChatTokenizer(model.tokenizer_path, config.template)
        stop_ids = tuple(dict.fromkeys((*config.stop_ids, *self.tokenizer.stop_ids)))
        config = config.model_copy(update={"stop_ids": stop_ids})
        self._environment = None
        if config.environment is not None:
            self._environment = Environment(config.environment, self.tokenizer, config.max_response_tokens)
        context = EngineContext(
            config=config,
            model=model,
            tokenizer=self.tokenizer.tokenizer,
            device=self.device,
            num_tp_devices=self.context.num_tp_devices,
            can_sleep=self.context.can_offload,
            actor=weights,
        )
        self.engine: RolloutEngine = load_engine_class(config.engine).start(context)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("prompt_ids", "prompt_id", "sample?"),
        writes=RESPONSE_COLUMNS,
        resolve=add_environment_columns,
    )
    def generate(self, batch: TensorDict, temperature: float | None = None) -> TensorDict:
        """Returns one response per prompt. A `temperature` of 0 is greedy; None is the temperature of the settings.

        Rows with the same `prompt_id` get different random numbers if their `sample` differs. A missing `sample` is 0.
        """
        prompts = objects(batch, "prompt_ids")
        prompt_id_B = batch["rows", "prompt_id"]
        sample_B = batch["rows"].get("sample", torch.zeros_like(prompt_id_B))
        requests = make_requests(prompts, prompt_id_B, sample_B, seed=self.seed, temperature=temperature)
        columns = self._environment_columns(batch)
        responses = stack_responses(*generate_segments(self.engine, requests, self._environment, columns))
        return responses_to_tensordict(prompts, responses, self.tokenizer)

    def _environment_columns(self, batch: TensorDict) -> Sequence[Columns]:
        return environment_columns(batch) if self._environment is not None else [{}] * num_rows(batch)

    # Streaming of prompt groups.

    @register(
        Dispatch.ONE_TO_ALL,
        blocking=False,
        reads=("prompt_ids", "prompt_id", "sample"),
        resend=False,
        resolve=add_environment_columns,
    )
    def add(self, batch: TensorDict, samples: int) -> dict[int, str | None]:
        """Queues prompt groups of `samples` rows for `poll`.

        Returns: for each `prompt_id`, None if the prompt was queued, otherwise the reason for which the engine rejected
        it. Raises RolloutError if the rollout shares the actor's weights, because training would change them during
        generation.
        """
        if self._actor is not None:
            raise RolloutError(
                "the rollout shares the weights of the actor in its process, which training changes during streaming: "
                "assign rollout to a pool of its own in the placement, or set schedule.kind to sync or one_step_off"
            )
        groups = make_groups(batch, samples, self.seed, self._environment_columns(batch))
        rejections = {prompt_id: self._queue(group.requests) for prompt_id, group in groups.items()}
        self._groups.add({prompt_id: group for prompt_id, group in groups.items() if rejections[prompt_id] is None})
        return rejections

    def _queue(self, requests: Sequence[Request]) -> str | None:
        """Adds all requests of a prompt to the engine. If the engine rejects the prompt, returns the reason, otherwise
        None.
        """
        try:
            self._streaming.add(requests)
        except PromptError as error:
            return error.reason
        return None

    @register(
        Dispatch.COLLECT,
        blocking=False,
        rows="unknown",
        writes=(*RESPONSE_COLUMNS, "prompt_id", "sample"),
        resend=False,
    )
    def poll(self, slice_s: float) -> TensorDict:
        """Generates for up to `slice_s` seconds. Returns the rows of all complete groups, in the order in which they
        were added.

        Returns before the time is over if a group is complete and no request waits for a slot. The driver can then add
        requests. Returns immediately if no request is unfinished, or if a weight update is running.
        """
        deadline = time.monotonic() + slice_s
        if self.engine.state is not EngineState.UPDATING:
            engine = self._streaming
            while engine.num_running and not (self._groups.has_complete and engine.num_running <= self._max_num_seqs):
                left_s = deadline - time.monotonic()
                engine.add(self._groups.add_responses(engine.poll(max(0.0, left_s)), self._environment))
                if left_s <= 0:
                    break
        return self._groups.pop_complete(self.tokenizer)

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def abort(self, prompt_ids: Sequence[int]) -> None:
        """Drops the groups of these prompts, even if they are complete. Ignores unknown prompts."""
        self._streaming.abort(self._groups.drop(prompt_ids))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def abort_all(self) -> None:
        self._streaming.abort(self._groups.drop())

    @property
    def _streaming(self) -> StreamingEngine:
        assert isinstance(self.engine, StreamingEngine), "a schedule that streams requires an engine with `streaming`"
        return self.engine

    # Weights.

    @property
    def weight_owners(self) -> tuple[Worker, ...]:
        return () if self._actor is None else (self._actor,)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def set_version(self, version: int) -> None:
        """Sets the weights to those of the actor in this process, after an update of the actor."""
        assert self._actor is not None, "weights of another process arrive through load_weights"
        assert isinstance(self.engine, ColocatedEngine), "an engine in the actor's process has no own process"
        self.engine.load_from(self._actor.model, version)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",))
    def load_weights(self, weights: Mapping[str, np.ndarray], version: int, bucket: int = 0, of: int = 1) -> None:
        """Loads bucket number `bucket` of a weight update that has `of` buckets. With shared weights, sets only the
        version.

        The engine does not generate until the last bucket is loaded. Bucket 0 restarts an unfinished update, because a
        recovered process receives all buckets again.
        """
        if self.shares_weights:
            self.set_version(version)
        else:
            self._load_bucket(weights, version, bucket, of)

    def _load_bucket(self, weights: Any, version: int, bucket: int, num_buckets: int) -> None:  # Any: the transport's
        if bucket == 0:
            if self.engine.state is EngineState.UPDATING:
                self.engine.abort_update()
            self.engine.begin_update(version)
        self.engine.receive(weights)
        if bucket == num_buckets - 1:
            self.engine.commit()

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=("weights",))
    def check_weights(self, samples: WeightSamples) -> Compared:
        """Compares the engine's weights with samples of the actor's weights. Raises CheckFailed if they differ.

        A recovered process skips the check if its weights are newer than the samples.
        """
        is_newer = self.engine.state is EngineState.UPDATING or self.engine.version > samples.version
        if self.shares_weights or (is_newer and self.context.replaced):
            return Compared()
        if self.engine.version != samples.version:
            raise CheckFailed(
                f"the rollout serves weight version {self.engine.version}, but the actor has version "
                f"{samples.version}: the update has not arrived"
            )
        compared = self.engine.compare_weights(samples)
        check_compared(compared, samples.version)
        return compared

    # GPU transports cannot replay their buckets, so the loss of a process ends the run.

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",))
    def load_ipc(self, shared: "Sequence[IpcBucket]", version: int, bucket: int, of: int) -> None:
        """Loads a bucket from the IPC buffers of the actor's ranks. The arguments are those of `load_weights`."""
        self._check_not_replayed()
        self._load_bucket(shared[0].merged(shared), version, bucket, of)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=())
    def join_transfer_group(self, group: Mapping[str, Any]) -> None:  # Any: the fields of `TransferGroup`
        """Joins the NCCL transfer group with all devices of this replica. Blocks until all ranks have joined."""
        self._check_not_replayed()
        assert isinstance(self.engine, BroadcastEngine), "nccl requires an engine with this transport"
        self.engine.join_transfer_group(group, 1 + self.rank * self.context.num_tp_devices)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",))
    def load_broadcast(self, metadata: "WeightMetadata", version: int, bucket: int, of: int) -> None:
        """Loads a bucket that the actor broadcasts at the same time. The arguments are those of `load_weights`."""
        self._check_not_replayed()
        self._load_bucket(metadata, version, bucket, of)

    def _check_not_replayed(self) -> None:
        if self.context.replaced:
            raise RuntimeError(
                "the rollout's process was lost, and its weights came over a GPU transport, which cannot be replayed: "
                "resume from the last checkpoint (resume: auto), or set rollout.transfer.via: object_store"
            )

    @classmethod
    def user_functions(cls, config: RolloutConfig, *_: Any, **__: Any) -> tuple[str, ...]:  # Any: the constructor's
        return () if config.environment is None else (config.environment,)

    # Device memory.

    @classmethod
    def can_offload_device(
        cls, device: str, config: RolloutConfig, *_: Any, **__: Any
    ) -> bool:  # Any: the constructor's
        return config.can_sleep(on_gpus=device != "cpu")

    def offload(self, *, keep_weights: bool) -> None:
        if self.context.can_offload and self._sleeping.asleep != TAGS:
            self._sleeping.sleep()

    def onload(self) -> None:
        self.onload_parts(tuple(TAGS))

    def onload_parts(self, parts: tuple[str, ...]) -> None:
        if self.context.can_offload and self._sleeping.asleep.intersection(parts):
            self._sleeping.wake(parts)

    @property
    def _sleeping(self) -> SleepingEngine:
        assert isinstance(self.engine, SleepingEngine), "a process that offloads requires an engine with `sleep`"
        return self.engine


@dataclass
class _Sample:
    """A response of a prompt group."""

    index: int
    """Index among the samples of the prompt."""
    request: Request
    """Request of the newest segment."""
    columns: Columns
    """Columns of the row, for the environment."""
    response: Response | None = None
    """Last segment; None until the response is complete."""


@dataclass
class PromptGroup:
    """Requests and responses of one prompt."""

    prompt: Sequence[int]
    samples: dict[str, _Sample] = field(default_factory=dict)
    """Maps a request id to its sample."""

    @property
    def is_complete(self) -> bool:
        return all(sample.response is not None for sample in self.samples.values())

    @property
    def requests(self) -> list[Request]:
        return [sample.request for sample in self.samples.values()]


def make_groups(batch: TensorDict, samples: int, seed: int, columns: Sequence[Columns]) -> dict[int, PromptGroup]:
    """Creates the group of each prompt, by `prompt_id`. Raises ValueError unless each prompt has `samples` rows."""
    prompt_id_B, sample_B = batch["rows", "prompt_id"], batch["rows", "sample"]
    unique_U, counts_U = prompt_id_B.unique(return_counts=True)
    for prompt_id, count in zip(unique_U.tolist(), counts_U.tolist(), strict=True):
        if count != samples:
            raise ValueError(
                f"prompt {prompt_id} has {count} rows, but a group has {samples}: add all of them in one call"
            )
    keys = row_keys(seed, prompt_id_B, sample_B).tolist()
    rows = zip(objects(batch, "prompt_ids"), prompt_id_B.tolist(), sample_B.tolist(), keys, columns, strict=True)
    groups: dict[int, PromptGroup] = {}
    for prompt, prompt_id, sample, key, row_columns in rows:
        request = Request(f"{prompt_id}-{sample}", prompt, key)
        group = groups.setdefault(prompt_id, PromptGroup(prompt))
        group.samples[request.request_id] = _Sample(sample, request, row_columns)
    return groups


class PromptGroups:
    """Buffer of a streaming rollout. It collects responses by prompt until all samples of the prompt have finished."""

    def __init__(self) -> None:
        self._groups: dict[int, PromptGroup] = {}
        """Maps a prompt_id to its group."""
        self._samples: dict[str, _Sample] = {}
        """Maps a request id to its sample."""

    @property
    def has_complete(self) -> bool:
        return any(group.is_complete for group in self._groups.values())

    def add(self, groups: Mapping[int, PromptGroup]) -> None:
        self._groups |= groups
        for group in groups.values():
            self._samples |= group.samples

    def add_responses(self, responses: Iterable[Response], environment: Environment | None) -> list[Request]:
        """Adds finished segments. Returns the requests for the next segments of incomplete responses."""
        continued = []
        for response in responses:
            sample = self._samples[response.request_id]
            following = environment and environment.next_request(sample.request, response, sample.columns)
            if following is None:
                sample.response = response
            else:
                sample.request = following
                continued.append(following)
        return continued

    def pop_complete(self, tokenizer: ChatTokenizer) -> TensorDict:
        """Removes all complete groups and returns their rows, in the order in which the groups were added."""
        complete = {prompt_id: group for prompt_id, group in self._groups.items() if group.is_complete}
        self._remove(complete)
        rows = [
            (prompt_id, group, sample) for prompt_id, group in complete.items() for sample in group.samples.values()
        ]
        responses = [sample.response for _, _, sample in rows if sample.response is not None]
        return responses_to_tensordict(
            [group.prompt for _, group, _ in rows],
            stack_responses(responses, [sample.request for _, _, sample in rows]),
            tokenizer,
            prompt_id=torch.tensor([prompt_id for prompt_id, _, _ in rows], dtype=torch.int64),
            sample=torch.tensor([sample.index for _, _, sample in rows], dtype=torch.int64),
        )

    def drop(self, prompt_ids: Iterable[int] | None = None) -> list[str]:
        """Removes the groups of these prompts (None: all groups) and returns their request ids."""
        dropped = list(self._groups) if prompt_ids is None else [i for i in set(prompt_ids) if i in self._groups]
        request_ids = [request_id for prompt_id in dropped for request_id in self._groups[prompt_id].samples]
        self._remove(dropped)
        return request_ids

    def _remove(self, prompt_ids: Iterable[int]) -> None:
        for prompt_id in prompt_ids:
            for request_id in self._groups.pop(prompt_id).samples:
                del self._samples[request_id]


def responses_to_tensordict(
    prompts: Sequence[Sequence[int]], responses: Responses, tokenizer: ChatTokenizer, **columns: torch.Tensor
) -> TensorDict:
    """Combines prompts, responses and additional row columns [B] into a TensorDict.

    `response_mask` is true for tokens that the policy sampled, and false for those of the prompt and an environment.
    """
    prompt_lengths_B = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    lengths_B = prompt_lengths_B + responses.lengths
    rows_T = torch.repeat_interleave(torch.arange(len(prompts)), lengths_B)
    positions_T = torch.arange(len(rows_T)) - (torch.cumsum(lengths_B, 0) - lengths_B)[rows_T]
    in_response_T = positions_T >= prompt_lengths_B[rows_T]
    input_ids_T = torch.empty(len(rows_T), dtype=torch.int64)
    input_ids_T[in_response_T] = responses.tokens
    input_ids_T[~in_response_T] = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
    tokens = {
        "input_ids": input_ids_T,
        "response_mask": torch.zeros_like(in_response_T).masked_scatter(in_response_T, responses.is_policy),
        "rollout_logprobs": torch.zeros(len(rows_T)).masked_scatter(in_response_T, responses.logprobs.float()),
        "weight_version": torch.full(rows_T.shape, -1, dtype=torch.int32).masked_scatter(
            in_response_T, responses.versions
        ),
    }
    texts = [tokenizer.decode(ids) for ids in responses.token_lists()]
    return make_tensordict({"truncated": responses.truncated, "response": texts, **columns}, tokens, lengths_B)
