"""Rollout engine on transformers. It generates for batches (`generate`) or for a stream of requests (`add`, `poll`)."""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from flowrl.config import ModelConfig, RolloutConfig
from flowrl.config.engines.rollout_engines import ENGINES
from flowrl.engines.models.int8 import quantized_copy
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.sharded_loading import move_loaded, stream_full_weights
from flowrl.engines.models.weight_samples import WeightSamples
from flowrl.engines.models.weights import WeightTargets, full_weights, gathered_weights, meta_copy, write_weights
from flowrl.engines.rollout.base import (
    EngineContext,
    EngineState,
    Request,
    Response,
    RolloutError,
    ServingState,
    check_request_ids,
    check_requests,
    eos_ids,
    generate_in_batch,
)
from flowrl.engines.rollout.hf.decoder import Decoder, Row
from flowrl.engines.rollout.hf.kv_cache import with_slot_attention
from flowrl.engines.rollout.hf.routes import RouteRecorder
from flowrl.engines.rollout.weight_check import Compared, compare_model

_JOIN_SHARE = 8
"""Waiting rows join once 1/8 of the slots is free. Waiting saves prefills, each of which costs about half a decode
step.
"""


class HfRollout:
    """Generates responses with a transformers model. An actor may train the same model.

    The engine neither copies nor modifies the weights, except in an update. While added requests are unfinished,
    weights may change only through `begin_update`.
    """

    capabilities = ENGINES["hf"]

    @classmethod
    def start(cls, context: EngineContext) -> "HfRollout":
        """Returns an engine with the actor's model, an empty copy that receives gathered weights, or its own model."""
        config, actor, device = context.config, context.actor, torch.device(context.device)
        gathered_from = None
        if config.quantization is not None:
            model = _load_quantized(context.model, device)
        elif actor is None:
            model = move_loaded(load_policy(context.model), device)
        elif actor.must_gather:
            model, gathered_from = meta_copy(actor.model), actor.model
        else:
            model = actor.model
        return cls(model, context.tokenizer, config, device, gathered_from=gathered_from)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        *,
        gathered_from: PreTrainedModel | None = None,
    ) -> None:
        """Moves the model to the device, unless its weights are on the meta device.

        Responses end at the end-of-sequence tokens of the tokenizer and of the model's generation config. If `model` is
        a `meta_copy` of `gathered_from`, `generate` gathers the weights. Raises RolloutError if the model has layers
        without a KV cache.
        """
        if not model._supports_attention_backend:
            raise RolloutError(
                f"engine hf needs a model whose attention goes through transformers' AttentionInterface, which "
                f"{type(model).__name__} does not use: set rollout.engine: vllm, or use another model"
            )
        self._gathered_from = gathered_from
        self._is_gathered = False
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(device)  # pyright: ignore[reportArgumentType] (transformers narrows `to`)
        model.eval()
        self.model = with_slot_attention(model)
        """Copy of the model's module tree, which shares all parameters with the original model."""
        self._serving = ServingState()
        self._config = config
        self._device = torch.device(device)
        self.max_length = _max_length(model.config.get_text_config())
        """Maximum number of tokens of prompt and response together."""
        self._eos_ids = eos_ids(tokenizer, model.generation_config)
        self._routes = RouteRecorder(self.model) if config.router_replay else None
        self._batch = self._new_batch()

    @property
    def no_routes(self) -> np.ndarray | None:
        """An empty array of routes. None if responses have no routes."""
        return None if self._routes is None else self._routes.no_routes

    # Weight updates, for a model that the engine owns.

    @property
    def version(self) -> int:
        return self._serving.version

    @property
    def state(self) -> EngineState:
        return self._serving.state

    def begin_update(self, version: int) -> None:
        """Begins an update to `version` and pauses all requests. Raises RolloutError if an update is already
        running.
        """
        self._serving.check_begin()
        self._batch.pause(self.version)
        self._targets = WeightTargets(self.model)
        self._serving.begin(version, self._targets.names)

    def receive(self, weights: Mapping[str, np.ndarray]) -> None:
        """Writes some of the weights. The format is that of `export_weights`.

        Raises RolloutError if no update is running. Raises WeightsError if the weights do not match the model; the
        engine is then broken until an update completes.
        """
        self._serving.require(EngineState.UPDATING, "receive weights")
        with self._serving.mark_failed_on_error():
            self._targets.write(weights)
        self._serving.mark_received(weights.keys())

    def commit(self) -> None:
        """Completes the running update. Raises RolloutError if weights are missing."""
        self._serving.require(EngineState.UPDATING, "commit weights")
        with self._serving.mark_failed_on_error():
            self._serving.check_complete()
        self._serving.commit()

    def abort_update(self) -> None:
        """Abandons the running update. The engine is broken until an update completes."""
        self._serving.abort()

    def load_from(self, actor: PreTrainedModel, version: int) -> None:
        """Sets the version. With quantized weights, also copies the weights of the actor."""
        self._batch.pause(self.version)
        if self._config.quantization is not None:
            write_weights(self.model, full_weights(actor))
        self._serving.version = version

    def compare_weights(self, samples: WeightSamples) -> Compared:
        """Compares the engine's weights with samples of the actor's weights."""
        self._serving.require(EngineState.SERVING, "compare weights")
        return compare_model(self.model, samples)

    # Generation.

    @property
    def num_running(self) -> int:
        """Number of added requests whose responses `poll` has not yet returned."""
        return self._batch.num_running

    @property
    def num_kept(self) -> int:
        """Number of added requests that have finished and whose KV caches are kept for their next turn."""
        return self._batch.num_kept

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Returns the response to each request, in order. Requests from `add` pause during the call and keep their KV
        cache.

        Raises PromptError if a prompt is empty or too long, and RolloutError if an update is running or has failed.
        """
        self._serving.require(EngineState.SERVING, "generate")
        # Gather before checking the prompts, because all ranks gather together, even if the check fails on one rank.
        with self.gathered_weights():
            return generate_in_batch(self.open_batch(), requests)

    def open_batch(self) -> "SeparateBatch":
        """Returns an empty batch of requests. While it is polled, requests of `add` pause and keep their KV cache."""
        return SeparateBatch(self, self._new_batch())

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Raises PromptError if a prompt is empty or too long."""
        check_requests(requests, self._config.max_response_tokens, self.max_length)

    @contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """Inside the `with` block, the model has the gathered or merged weights of the actor. Blocks can be nested."""
        if self._gathered_from is None or self._is_gathered:
            yield
            return
        with gathered_weights(self.model, self._gathered_from):
            self._is_gathered = True
            try:
                yield
            finally:
                self._is_gathered = False

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests. `poll` decodes up to `max_num_seqs` requests at a time, in FIFO order.

        For the same prompt and key, the response is bitwise identical to that of `generate`. Raises RolloutError if a
        request id is in use or a prompt is too long.
        """
        self._serving.require(EngineState.SERVING, "add requests")
        requests = list(requests)
        self.check_requests(requests)
        self._batch.add(requests)

    @torch.no_grad()
    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Decodes until a response has finished or the timeout has expired. Returns all finished responses."""
        self._serving.require(EngineState.SERVING, "generate")
        return self._batch.poll(self.version, timeout_s)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drops the requests with these ids, and the KV caches kept for their next turn. Ignores unknown ids."""
        self._batch.abort(request_ids)

    def read_partial(self, request_ids: Collection[str]) -> list[Response]:
        """Returns copies of the unfinished responses to these requests of `add`. Ignores unknown ids."""
        return self._batch.read_partial(request_ids)

    def _new_batch(self) -> "ContinuousBatch":
        decoder = Decoder(self.model, self._config, self._eos_ids, self.max_length, self._device, routes=self._routes)
        return ContinuousBatch(decoder, self._config.num_seqs)


class SeparateBatch:
    """Requests of one caller. The caller polls inside `gathered_weights` if the actor is sharded."""

    def __init__(self, engine: HfRollout, batch: "ContinuousBatch") -> None:
        self._engine, self._batch = engine, batch

    @property
    def num_running(self) -> int:
        return self._batch.num_running

    @property
    def num_kept(self) -> int:
        """Number of requests that have finished and whose KV caches are kept for their next turn."""
        return self._batch.num_kept

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests. Raises PromptError if a prompt is empty or too long."""
        requests = list(requests)
        self._engine.check_requests(requests)
        # Equal prompts are adjacent, so that they join together and share a prefill.
        self._batch.add(sorted(requests, key=lambda request: (len(request.context), request.context)))

    @torch.no_grad()
    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Decodes until a response has finished or the timeout has expired. Returns all finished responses."""
        return self._batch.poll(self._engine.version, timeout_s)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._batch.abort(request_ids)


class ContinuousBatch:
    """Continuous batching: up to `max_num_seqs` requests decode together, and all other requests wait in a queue."""

    def __init__(self, decoder: Decoder, max_num_seqs: int) -> None:
        self._decoder, self._max_num_seqs = decoder, max_num_seqs
        self._request_ids: dict[str, None] = {}
        """Ids of the unfinished requests, in the order in which they were added."""
        self._waiting: deque[Row] = deque()

    @property
    def num_running(self) -> int:
        return len(self._request_ids)

    @property
    def num_kept(self) -> int:
        return len(self._decoder.turn_caches)

    def add(self, requests: Sequence[Request]) -> None:
        check_request_ids([request.request_id for request in requests], self._request_ids)
        self._request_ids.update(dict.fromkeys(request.request_id for request in requests))
        self._waiting.extend(Row(request, Response(request.request_id)) for request in requests)

    def poll(self, version: int, timeout_s: float | None = None) -> list[Response]:
        """Decodes until a response has finished or the timeout has expired. Returns all finished responses."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        finished: list[Response] = []
        while self._request_ids and not finished:
            self._join_waiting()
            finished = [row.response for row in self._decoder.step(version)]
            for response in finished:
                del self._request_ids[response.request_id]
            if deadline is not None and time.monotonic() >= deadline:
                break
        return finished

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drops the requests with these ids, and the KV caches kept for their next turn. Ignores unknown ids."""
        request_ids = set(request_ids)
        self._decoder.turn_caches.release(request_ids)
        dropped = request_ids & self._request_ids.keys()
        if not dropped:
            return
        for request_id in dropped:
            del self._request_ids[request_id]
        self._decoder.drop(dropped)
        self._waiting = deque(row for row in self._waiting if row.request.request_id not in dropped)

    def read_partial(self, request_ids: Collection[str]) -> list[Response]:
        """Returns copies of the unfinished responses to these requests. A waiting request may have tokens, too."""
        waiting = [row.response for row in self._waiting if row.response.request_id in request_ids]
        return [*map(deepcopy, waiting), *self._decoder.read_partial(request_ids)]

    def pause(self, version: int) -> None:
        """Interrupts decoding: moves all decoding rows to the front of the queue of waiting rows.

        `begin_update` calls this method before the weights change. `version` is the weight version before the change.
        The rows keep their tokens. When the rows join the batch again, a prefill recomputes their keys and values. The
        KV caches of episodes between two turns are dropped, so the next turn prefills all tokens.
        """
        order = {request_id: index for index, request_id in enumerate(self._request_ids)}
        rows = self._decoder.remove_all(version)
        self._waiting.extendleft(sorted(rows, key=lambda row: order[row.request.request_id], reverse=True))

    def _join_waiting(self) -> None:
        num_free = self._max_num_seqs - self._decoder.num_rows
        if self._waiting and num_free >= min(len(self._waiting), max(1, self._max_num_seqs // _JOIN_SHARE)):
            self._decoder.join([self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))])
        self._decoder.shrink()


def _load_quantized(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    source = load_policy(config, on_meta=True)
    model = quantized_copy(source, device)
    write_weights(model, stream_full_weights(source))
    return model


def _max_length(settings: PreTrainedConfig) -> int:
    """Returns the maximum sequence length. A sliding window does not limit it."""
    layer_types = getattr(settings, "layer_types", None) or []
    without_cache = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if without_cache:
        raise RolloutError(
            f"the model has {', '.join(without_cache)} layers, but engine hf supports attention layers only: use "
            f"rollout.engine: vllm, or another model"
        )
    # getattr resolves GPT-2's name of this setting too.
    limit = getattr(settings, "max_position_embeddings", None)
    return 2**31 if limit is None else limit
