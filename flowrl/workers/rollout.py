"""Rollout worker, which generates responses with the actor's weights, for batches or for a stream of prompt groups."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.config import CheckFailed, LoraConfig, ModelConfig, RolloutConfig
from flowrl.controller.worker import Arguments, Contract, Dispatch, Worker, register
from flowrl.data.batch.tensordicts import num_rows, objects
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.models.routing import ROUTES
from flowrl.engines.models.weight_samples import WeightSamples
from flowrl.engines.rollout.adapted_weights import AdaptedWeights, start_engine
from flowrl.engines.rollout.base import (
    TAGS,
    ActorWeights,
    BroadcastEngine,
    ColocatedEngine,
    EngineContext,
    EngineState,
    PreemptingEngine,
    PromptError,
    Request,
    RolloutEngine,
    RolloutError,
    RoutingEngine,
    SleepingEngine,
    StreamingEngine,
)
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.engines.rollout.sampling import row_keys
from flowrl.engines.rollout.weight_check import Compared, check_compared
from flowrl.rewards.row_scorer import CALLS, FAILED
from flowrl.user_code.channel import ServerAddress
from flowrl.workers.actor import Actor
from flowrl.workers.dialogs import EPISODE, EnvironmentServers
from flowrl.workers.episodes import (
    EPISODE_READS,
    POLL_S,
    SEGMENTS,
    Columns,
    Episode,
    EpisodeConnections,
    EpisodeRun,
    Episodes,
    continue_episodes,
    episode_columns,
    episodes_to_tensordict,
    run_episodes,
)

if TYPE_CHECKING:
    from flowrl.engines.rollout.broadcast import TransferGroup
    from flowrl.engines.rollout.cuda_ipc import IpcBucket
    from flowrl.engines.rollout.weight_metadata import WeightMetadata
    from flowrl.workers.groups import RolloutGroup

RESPONSE_COLUMNS = (
    "input_ids",
    "response_mask",
    "rollout_logprobs",
    "weight_version",
    "truncated",
    "response",
    "tagged_response",
)


def add_columns(contract: Contract, cls: type[Worker], arguments: Arguments, config: RolloutConfig) -> Contract:
    """Returns the contract of a call that generates, for `register(resolve=...)`.

    Environments and rewards read more columns. Scored responses, those of an environment, and those with routes have
    more columns.
    """
    score = arguments.get("score", ())
    if isinstance(contract.reads, tuple) and score:
        contract = replace(contract, reads=(*contract.reads, *EPISODE_READS))
    if contract.writes:
        segments = (SEGMENTS,) if EPISODE in score else ()
        scores = (*score, FAILED, CALLS) if score else ()
        routes = (ROUTES,) if config.router_replay else ()
        contract = replace(contract, writes=(*contract.writes, *scores, *segments, *routes))
    return contract


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
        self.seed, self._max_num_seqs = seed, config.num_seqs
        actor = self.find_peer(Actor)
        self._actor = actor if actor is not None and actor.can_share_weights(self) else None
        self.shares_weights = self._actor is not None and config.can_share_weights
        """Whether the rollout generates with the actor's own weights."""
        weights = None
        if self._actor is not None:
            weights = ActorWeights(self._actor.language_model, self._actor.has_gathered_weights)
        self.tokenizer = ChatTokenizer(model.tokenizer_path, config.template, model=model.path)
        stop_ids = tuple(dict.fromkeys((*config.stop_ids, *self.tokenizer.stop_ids)))
        config = config.model_copy(update={"stop_ids": stop_ids})
        self._connections = EpisodeConnections(self.tokenizer, config.max_response_tokens)
        self._groups = PromptGroups(self._connections.open(is_scored=False))
        self._batch_ids = itertools.count()
        self._expects_update = False
        """Whether a weight update precedes the next generation."""
        self._evaluation: EpisodeRun | None = None
        """Held-out rows that the rollout generates alongside its prompt groups."""
        context = EngineContext(
            config=config,
            model=model,
            tokenizer=self.tokenizer.tokenizer,
            device=self.device,
            replica=self.context.replica,
            followers=self.context.followers,
            address=self.context.address,
            can_sleep=self.context.can_offload,
            actor=weights,
        )
        self._model, self._sent_dtype = model, config.sent_dtype
        self._adapted: AdaptedWeights | None = None
        """The base model with the adapter of the last update."""
        self.engine: RolloutEngine = start_engine(context)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("prompt_ids", "prompt_id", "sample?"),
        writes=RESPONSE_COLUMNS,
        resolve=add_columns,
    )
    def generate(self, batch: TensorDict, temperature: float | None = None, score: tuple[str, ...] = ()) -> TensorDict:
        """Returns one response per prompt. A `temperature` of 0 is greedy; None is the temperature of the settings.

        Rows with the same `prompt_id` get different random numbers if their `sample` differs. A missing `sample` is 0.
        `score` names the columns of the reward (`connect_reward`), which scores a response while others are generated.
        """
        own = self._new_episodes(batch, temperature, score)
        with self._connections.share(is_scored=bool(score)) as episodes:
            run_episodes(self.engine, own, episodes)
        return self._to_tensordict(own, score)

    def _to_tensordict(self, own: Sequence[Episode], score: Sequence[str], **columns: torch.Tensor) -> TensorDict:
        """Returns the rows of complete episodes, and adds them and their sampled tokens to the usage of the call."""
        no_routes = self.engine.no_routes if isinstance(self.engine, RoutingEngine) else None
        responses = episodes_to_tensordict(
            own, self.tokenizer, score, with_segments=EPISODE in score, no_routes=no_routes, **columns
        )
        num_tokens = int(responses["tokens", "response_mask"].sum())
        self.context.add_usage(tokens=num_tokens / self.context.replica.num_devices, responses=num_rows(responses))
        return responses

    def _new_episodes(self, batch: TensorDict, temperature: float | None, score: Sequence[str]) -> list[Episode]:
        """Returns an episode without a response for each row. The arguments are those of `generate`."""
        prompt_id_B = batch["rows", "prompt_id"]
        sample_B = batch["rows"].get("sample", torch.zeros_like(prompt_id_B))
        requests = make_requests(
            objects(batch, "prompt_ids"),
            prompt_id_B,
            sample_B,
            seed=self.seed,
            temperature=temperature,
            may_continue=self._has_environment,
            # `generate` may run while an evaluation is pending, on the same engine.
            name=f"batch-{next(self._batch_ids)}",
        )
        samples = zip(sample_B.tolist(), requests, self._episode_columns(batch, score), strict=True)
        return [Episode(sample, request, row) for sample, request, row in samples]

    @property
    def _has_environment(self) -> bool:
        return self._connections.environment is not None

    def _episode_columns(self, batch: TensorDict, score: Sequence[str]) -> Sequence[Columns]:
        return episode_columns(batch) if score else [{}] * num_rows(batch)

    # Rewards.

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=())
    def connect_reward(self, servers: Sequence[ServerAddress], key: bytes) -> None:
        """Connects the rollout to the reward workers that score its responses (calls with `score`)."""
        self._connections.reward = servers, key
        self._reconnect()

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=())
    def connect_environment(self, servers: EnvironmentServers) -> None:
        """Runs all episodes with these environment workers from now on."""
        self._connections.environment = servers
        self._reconnect()

    def _reconnect(self) -> None:
        """Replaces the connections of the stream of prompt groups. The next call of `generate` connects again."""
        self._connections.close()
        self._groups.episodes.close()
        self._groups = PromptGroups(self._connections.open(is_scored=True))

    def close(self) -> None:
        self._groups.episodes.close()
        self._connections.close()
        self._end_evaluation()

    # Streaming of prompt groups.

    @register(
        Dispatch.ONE_TO_ALL,
        blocking=False,
        reads=("prompt_ids", "prompt_id", "sample"),
        resend=False,
        resolve=add_columns,
    )
    def add(self, batch: TensorDict, samples: int, score: tuple[str, ...] = ()) -> dict[int, str | None]:
        """Queues prompt groups of `samples` rows for `poll`. `score` is that of `poll`.

        Returns: for each `prompt_id`, None if the prompt was queued, otherwise the reason for which the engine rejected
        it. Raises RolloutError if the rollout shares the actor's weights, because training would change them during
        generation.
        """
        if self._actor is not None:
            raise RolloutError(
                "the rollout shares the weights of the actor in its process, which training changes during streaming: "
                "assign rollout to a pool of its own in the placement, or set schedule.kind to sync or one_step_off"
            )
        columns = self._episode_columns(batch, score)
        groups = make_groups(batch, samples, self.seed, columns, may_continue=self._has_environment)
        if self._connections.environment is not None:
            self._groups.add(groups)
            return dict.fromkeys(groups)
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
        resolve=add_columns,
    )
    def poll(self, slice_s: float, score: tuple[str, ...] = ()) -> TensorDict:
        """Generates for up to `slice_s` seconds. Returns the rows of all complete groups, in the order in which they
        were added. A group is complete when all its responses have their scores.

        Returns before the time is over if a group is complete and no request waits for a slot. The driver can then add
        requests. Returns immediately if no request is unfinished, or if a weight update is running.

        Args:
            slice_s: largest duration in seconds.
            score: columns of the reward. Empty if the responses are not scored.
        """
        deadline = time.monotonic() + slice_s
        if self.engine.state is not EngineState.UPDATING:
            engine, groups = self._streaming, self._groups
            while not (groups.has_complete and engine.num_running <= self._max_num_seqs):
                left_s = max(0.0, deadline - time.monotonic())
                if engine.num_running:
                    responses = engine.poll(min(left_s, POLL_S) if groups.episodes.num_waiting else left_s)
                    continue_episodes(engine, groups.episodes, responses, 0)
                elif groups.episodes.num_waiting:
                    continue_episodes(engine, groups.episodes, [], left_s)
                else:
                    break
                if not left_s:
                    break
        rows = self._groups.pop_complete()
        return self._to_tensordict(
            [episode for _, episode in rows],
            score,
            prompt_id=torch.tensor([prompt_id for prompt_id, _ in rows], dtype=torch.int64),
            sample=torch.tensor([episode.index for _, episode in rows], dtype=torch.int64),
        )

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False, memory=())
    def count_waiting(self, samples: int) -> int:
        """Returns the number of episodes that wait for scores or an environment, divided by the samples of a group.
        They occupy no slots of the engine.
        """
        return self._groups.episodes.num_waiting // samples

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def abort(self, prompt_ids: Sequence[int]) -> None:
        """Drops the groups of these prompts, even if they are complete. Ignores unknown prompts."""
        self._streaming.abort(self._groups.drop(prompt_ids))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def abort_all(self) -> None:
        self._streaming.abort(self._groups.drop())
        self._end_evaluation()

    # Evaluation alongside training.

    @register(
        Dispatch.ONE_TO_ALL,
        blocking=False,
        reads=("prompt_ids", "prompt_id", "sample"),
        resend=False,
        resolve=add_columns,
    )
    def start_evaluation(self, batch: TensorDict, temperature: float, score: tuple[str, ...] = ()) -> None:
        """Prepares the generation of held-out rows by `poll_evaluation`. Replaces an earlier evaluation.

        The weights must not change before the end of the evaluation. The arguments are those of `generate`.
        """
        self._end_evaluation()
        own = self._new_episodes(batch, temperature, score)
        # The prompt groups keep at least half of the slots of an engine that shares its slots between batches.
        max_running = max(1, self._max_num_seqs // 2)
        self._evaluation = EpisodeRun(self.engine, own, self._connections.open(is_scored=bool(score)), max_running)

    @register(
        Dispatch.COLLECT, blocking=False, rows="unknown", writes=RESPONSE_COLUMNS, resend=False, resolve=add_columns
    )
    def poll_evaluation(self, slice_s: float, score: tuple[str, ...] = ()) -> TensorDict:
        """Generates held-out rows for up to `slice_s` seconds. Returns all rows, in their order, in the call that
        completes them, and no rows in other calls. `score` is that of `start_evaluation`.
        """
        run = self._evaluation
        if run is not None:
            run.advance(slice_s)
        complete: Sequence[Episode] = []
        if run is not None and run.is_done:
            complete = run.own
            self._end_evaluation()
        return self._to_tensordict(complete, score)

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    @property
    def _streaming(self) -> StreamingEngine:
        assert isinstance(self.engine, StreamingEngine), "a schedule that streams requires an engine with `streaming`"
        return self.engine

    def pop_usage(self) -> dict[str, float]:
        usage = super().pop_usage()
        if isinstance(self.engine, PreemptingEngine):
            usage["preemptions"] = self.engine.pop_preemptions()
        return usage

    # Weights.

    @property
    def weight_owners(self) -> tuple[Worker, ...]:
        return () if self._actor is None else (self._actor,)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def set_version(self, version: int) -> None:
        """Sets the weights to those of the actor in this process, after an update of the actor."""
        assert self._actor is not None, "weights of another process arrive through load_weights"
        assert isinstance(self.engine, ColocatedEngine), "an engine in the actor's process has no own process"
        self.engine.load_from(self._actor.language_model, version)

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
            self._load_bucket(weights, sum(array.nbytes for array in weights.values()), version, bucket, of)

    def _load_bucket(
        self, weights: Any, num_bytes: int, version: int, bucket: int, num_buckets: int
    ) -> None:  # Any: the transport's
        self.context.add_usage(weight_bytes=num_bytes)
        self._expects_update = False
        if bucket == 0:
            if self.engine.state is EngineState.UPDATING:
                self.engine.abort_update()
            self.engine.begin_update(version)
        self.engine.receive(weights)
        if bucket == num_buckets - 1:
            self.engine.commit()

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=("weights",))
    def load_adapter(self, adapter: Mapping[str, np.ndarray], lora: LoraConfig, bucket_mb: float, version: int) -> None:
        """Loads the weights of `version`: those of the base model, with a LoRA adapter.

        The base model is read from its files in each call, so that it needs no memory beside the engine's weights.
        `bucket_mb` limits the size in MB of the weights that are merged at a time. With shared weights, sets only the
        version.
        """
        if self.shares_weights:
            self.set_version(version)
            return
        self.context.add_usage(weight_bytes=sum(array.nbytes for array in adapter.values()))
        self._expects_update = False
        if self._adapted is None:
            self._adapted = AdaptedWeights(self._model, lora, torch.device(self.device))
        self._adapted.set(adapter)
        if self.engine.state is EngineState.UPDATING:
            self.engine.abort_update()
        self._adapted.load_into(self.engine, version, bucket_mb, self._sent_dtype)

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def expect_update(self) -> None:
        """Announces that a weight update precedes the next generation. The engine may drop its weights until then."""
        self._expects_update = True

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

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",), evicts=False)
    def load_ipc(self, shared: "Sequence[IpcBucket]", version: int, bucket: int, of: int) -> None:
        """Loads a bucket from the IPC buffers of the actor's ranks, whose weights stay on the device until the next
        call. The arguments are those of `load_weights`.
        """
        self._check_not_replayed()
        self._load_bucket(shared[0].merged(shared), sum(shared[0].metadata.sizes), version, bucket, of)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=())
    def join_transfer_group(self, group: "TransferGroup") -> None:
        """Joins a broadcast with all devices of this replica. Waits until all members have joined."""
        self._check_not_replayed()
        assert isinstance(self.engine, BroadcastEngine), "a broadcast requires an engine with the transport nccl"
        self.engine.join_transfer_group(group, self.rank * self.context.replica.num_devices)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",))
    def load_broadcast(self, metadata: "WeightMetadata", version: int, bucket: int, of: int) -> None:
        """Loads a bucket that the actor broadcasts at the same time. The arguments are those of `load_weights`."""
        self._check_not_replayed()
        self._load_bucket(metadata, sum(metadata.sizes), version, bucket, of)

    def _check_not_replayed(self) -> None:
        if self.context.replaced:
            raise RuntimeError(
                "the rollout's process was lost, and its weights came over a GPU transport, which cannot be replayed: "
                "resume from the last checkpoint (resume: auto), or set rollout.transfer.via: object_store"
            )

    # Device memory.

    @classmethod
    def can_offload_device(
        cls, device: str, config: RolloutConfig, *_: Any, **__: Any
    ) -> bool:  # Any: the constructor's
        return config.can_sleep(on_gpus=device != "cpu")

    def offload(self, *, keep_weights: bool) -> None:
        if self.context.can_offload and self._sleeping.asleep != TAGS:
            self._sleeping.sleep(keep_weights=not self._expects_update)

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
class PromptGroup:
    """Requests and responses of one prompt."""

    samples: dict[str, Episode] = field(default_factory=dict)
    """Maps a request id to its episode."""

    @property
    def requests(self) -> list[Request]:
        return [sample.request for sample in self.samples.values()]


def make_groups(
    batch: TensorDict, samples: int, seed: int, columns: Sequence[Columns], *, may_continue: bool
) -> dict[int, PromptGroup]:
    """Creates the group of each prompt, by `prompt_id`. Raises ValueError unless each prompt has `samples` rows.

    `may_continue` is that of the requests.
    """
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
        request = Request(f"{prompt_id}-{sample}", prompt, key, may_continue=may_continue)
        group = groups.setdefault(prompt_id, PromptGroup())
        group.samples[request.request_id] = Episode(sample, request, row_columns)
    return groups


class PromptGroups:
    """Buffer of a streaming rollout. It collects episodes by prompt until all samples of the prompt are complete."""

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes
        """Processes responses and scores."""
        self._groups: dict[int, PromptGroup] = {}
        """Maps a prompt_id to its group."""

    def _is_complete(self, group: PromptGroup) -> bool:
        return not any(map(self.episodes.is_unfinished, group.samples))

    @property
    def has_complete(self) -> bool:
        return any(map(self._is_complete, self._groups.values()))

    def add(self, groups: Mapping[int, PromptGroup]) -> None:
        self._groups |= groups
        for group in groups.values():
            self.episodes.add(group.samples.values())

    def pop_complete(self) -> list[tuple[int, Episode]]:
        """Removes all complete groups. Returns the prompt_id and the episode of each row, in the order in which the
        groups were added.
        """
        complete = {prompt_id: group for prompt_id, group in self._groups.items() if self._is_complete(group)}
        for prompt_id in complete:
            del self._groups[prompt_id]
        return [(prompt_id, sample) for prompt_id, group in complete.items() for sample in group.samples.values()]

    def drop(self, prompt_ids: Iterable[int] | None = None) -> list[str]:
        """Removes the groups of these prompts (None: all groups) and returns their request ids."""
        dropped = list(self._groups) if prompt_ids is None else [i for i in set(prompt_ids) if i in self._groups]
        request_ids = [request_id for prompt_id in dropped for request_id in self._groups.pop(prompt_id).samples]
        self.episodes.drop(request_ids)
        return request_ids
