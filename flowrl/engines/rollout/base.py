"""The protocol of rollout engines: requests, responses, methods and states. Imports neither torch nor an engine.

An engine implements `RolloutEngine` and the protocols of its `capabilities`, such as `StreamingEngine`. `open_batch`
gives every engine batches of requests that only their caller polls.
"""

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flowrl.config import (
    ONE_DEVICE,
    EngineCapabilities,
    Follower,
    ModelConfig,
    ReplicaSizes,
    RolloutConfig,
    UserError,
    import_attribute,
)
from flowrl.config.base import check_members, missing_members

if TYPE_CHECKING:
    import numpy as np
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from flowrl.engines.models.weight_samples import WeightSamples
    from flowrl.engines.rollout.broadcast import TransferGroup
    from flowrl.engines.rollout.weight_check import Compared


class RolloutError(UserError):
    """Raised if a rollout engine cannot run a request or an operation in its current state."""


class PromptError(RolloutError):
    """Raised if a prompt is empty or too long. The message has the form "prompt ROW REASON"."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row, self.reason = row, reason

    def __str__(self) -> str:
        return f"prompt {self.row} {self.reason}"


# Requests and responses.


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a response from one producer. The policy is trained on its own segments only."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Log-probability of each token of the policy. None for an environment."""
    versions: Sequence[int] | None = None
    """Weight version that sampled each token of the policy. None for an environment."""

    @classmethod
    def policy(cls, response: "Response") -> "Segment":
        """Returns the tokens that the engine has sampled, as a segment of the policy."""
        return cls(response.token_ids, response.logprobs, response.versions)

    @classmethod
    def environment(cls, token_ids: Sequence[int]) -> "Segment":
        """Returns a segment of an environment, such as the output of a tool."""
        return cls(token_ids)

    @property
    def is_policy(self) -> bool:
        """Whether the policy has sampled the tokens."""
        return self.versions is not None


@dataclass(frozen=True)
class Request:
    """A prompt for which the engine generates a response, or the next segment of a response."""

    request_id: str
    """Request id, which is unique among all unfinished requests."""
    token_ids: Sequence[int]
    """Tokens of the prompt."""
    key: int
    """Random-number key of the request, from `sampling.row_keys`."""
    temperature: float | None = None
    """Sampling temperature; None is that of the settings."""
    segments: Sequence[Segment] = ()
    """Earlier segments of the response. The engine samples the policy segment that follows them."""
    may_continue: bool = False
    """Whether a request with the same id and more segments may follow. An engine may keep the KV cache until then. The
    caller passes the id to `abort` when no request follows."""
    max_tokens: int | None = None
    """Maximum number of tokens of the response with all segments. None is `max_response_tokens`, which it may not
    exceed. Custom engines may ignore it."""
    is_streamed: bool = False
    """Whether the caller reads the tokens before the request has finished (`PartialResponses`)."""

    @property
    def greedy(self) -> bool:
        """Whether to select the most likely tokens, without top-k and top-p."""
        return self.temperature == 0

    @cached_property
    def context(self) -> tuple[int, ...]:
        """Tokens that the engine reads before it samples: those of the prompt and of all earlier segments."""
        return (*self.token_ids, *(token for segment in self.segments for token in segment.token_ids))

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens of the earlier segments. They count toward `max_response_tokens`."""
        return len(self.context) - len(self.token_ids)

    def response_limit(self, max_response_tokens: int) -> int:
        """Returns the maximum number of tokens of the response, given `max_response_tokens` of the settings."""
        return max_response_tokens if self.max_tokens is None else min(self.max_tokens, max_response_tokens)


@dataclass
class Response:
    """Policy segment that an engine samples for a request. It is partial until the request has finished."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Weight version that sampled each token, one per token."""
    truncated: bool = False
    """True if the response ended at the length limit. False if it ended at a stop token."""
    routes: "np.ndarray | None" = None
    """With `rollout.router_replay`, the values of the column `routes` of all processed tokens: those of the prompt, of
    earlier segments and of this segment, except the last one. [tokens, layers x experts per token]."""


def check_request_ids(new: Iterable[str], running: Iterable[str]) -> None:
    """Raises RolloutError if a new request id is a duplicate or belongs to an unfinished request."""
    known = set(running)
    for request_id in new:
        if request_id in known:
            raise RolloutError(f"request {request_id} is already running: use another id")
        known.add(request_id)


def check_requests(requests: Sequence[Request], max_response_tokens: int, max_length: int) -> None:
    """Checks requests before an engine runs them.

    Raises PromptError if a prompt is empty, or if prompt and response together can exceed `max_length` tokens. Raises
    RolloutError if the earlier segments of a response leave no token for the policy.
    """
    for row, request in enumerate(requests):
        num_tokens = len(request.token_ids)
        if not num_tokens:
            raise PromptError(row, "has no tokens: a prompt needs at least one")
        limit = request.response_limit(max_response_tokens)
        total = num_tokens + limit
        if total > max_length:
            raise PromptError(
                row,
                f"has {num_tokens} tokens, {total} with max_response_tokens {limit}, but the model's limit is "
                f"{max_length}: shorten one of them",
            )
        if request.num_response_tokens >= limit:
            raise RolloutError(
                f"the response to request {request.request_id} has {request.num_response_tokens} tokens before its "
                f"next segment, but max_response_tokens is {limit}: end the response earlier"
            )


def eos_ids(tokenizer: "PreTrainedTokenizerBase", generation: "GenerationConfig | None") -> list[int]:
    """Returns the token ids that end a response, from the tokenizer and the model's generation config."""
    ids = {tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set()
    model_ids = None if generation is None else generation.eos_token_id
    return sorted(ids | ({model_ids} if isinstance(model_ids, int) else set(model_ids or ())))


# Engine state.

WEIGHTS = frozenset({"weights"})
TAGS = WEIGHTS | {"kv_cache"}
"""Parts of an engine's memory that can be offloaded, named like vLLM's wake-up tags."""


class EngineState(enum.Enum):
    """State of a rollout engine. An engine never generates and loads weights at the same time."""

    SERVING = "serving"
    UPDATING = "updating"
    ASLEEP = "asleep"
    """The memory for the requested operation is offloaded."""
    BROKEN = "broken"
    """A weight update failed midway, or the weights were dropped. The engine cannot generate until an update
    completes.
    """


_FIX = {
    EngineState.SERVING: "begin an update first",
    EngineState.UPDATING: "commit or abort the update first",
    EngineState.ASLEEP: "wake it up first",
    EngineState.BROKEN: "send a complete update, because weights are missing or mixed from two versions",
}


class ServingState:
    """State machine of a rollout engine. It tracks the weight version, the running update and the offloaded memory."""

    def __init__(self) -> None:
        self.version = 0
        self.asleep: frozenset[str] = frozenset()
        """Subset of `TAGS` that is offloaded."""
        self._state_awake = EngineState.SERVING
        """State of the engine while no memory is offloaded."""
        self._next_version = 0
        self._missing: set[str] = set()
        """Names of weights that the running update has not received yet."""

    @property
    def state(self) -> EngineState:
        """Current state of the engine. An update continues while only the KV cache is offloaded."""
        return self._state_for(TAGS if self._state_awake is EngineState.SERVING else WEIGHTS)

    def require(self, state: EngineState, operation: str, tags: Collection[str] = TAGS) -> None:
        """Raises RolloutError unless the engine is in `state` and the memory named by `tags` is on the device."""
        current = self._state_for(tags)
        if current is not state:
            raise RolloutError(f"the rollout engine is {current.value} and cannot {operation}: {_FIX[current]}")

    def _state_for(self, tags: Collection[str]) -> EngineState:
        return EngineState.ASLEEP if self.asleep.intersection(tags) else self._state_awake

    # Updates.

    def check_begin(self) -> None:
        """Raises RolloutError if an update is running or the weights are offloaded."""
        is_broken = self._state_awake is EngineState.BROKEN
        self.require(EngineState.BROKEN if is_broken else EngineState.SERVING, "begin an update", WEIGHTS)

    def begin(self, version: int, names: Collection[str]) -> None:
        """Begins an update to `version`, which must receive all weights in `names`. Raises the errors of
        `check_begin`.
        """
        self.check_begin()
        self._next_version = version
        self._missing = set(names)
        self._state_awake = EngineState.UPDATING

    def require_update(self, operation: str) -> None:
        """Raises RolloutError unless an update is running and the weights are on the device."""
        self.require(EngineState.UPDATING, operation, WEIGHTS)

    def mark_received(self, names: Collection[str]) -> None:
        self._missing.difference_update(names)

    def check_complete(self) -> None:
        """Raises RolloutError if the running update has not received all weights."""
        if self._missing:
            names = ", ".join(sorted(self._missing)[:3])
            raise RolloutError(
                f"the update is incomplete: {len(self._missing)} weights are missing, such as {names}; send every "
                f"bucket, in order"
            )

    def commit(self) -> None:
        self.require_update("commit weights")
        self.version = self._next_version
        self._state_awake = EngineState.SERVING

    def abort(self) -> None:
        """Abandons the running update and sets the state to BROKEN."""
        self.require_update("abort an update")
        self._state_awake = EngineState.BROKEN

    @contextmanager
    def mark_failed_on_error(self) -> Iterator[None]:
        """Sets the state to BROKEN if the `with` block raises an exception."""
        try:
            yield
        except BaseException:  # also an interrupt leaves incomplete weights
            self._state_awake = EngineState.BROKEN
            raise

    # Sleep.

    def drop_weights(self) -> None:
        """Sets the state to BROKEN, because the weights were dropped. Raises RolloutError during an update."""
        self.check_begin()
        self._state_awake = EngineState.BROKEN

    def check_sleep(self) -> None:
        """Raises RolloutError if all memory is already offloaded."""
        if self.asleep == TAGS:
            self.require(self._state_awake, "sleep")

    def tags_to_wake(self, tags: Collection[str]) -> frozenset[str]:
        """Returns the subset of `tags` that is offloaded. Raises RolloutError if the subset is empty."""
        sleeping = self.asleep.intersection(tags)
        if not sleeping:
            names = " and ".join(sorted(tags))
            raise RolloutError(f"the rollout engine is {self.state.value}: {names} cannot wake up without being asleep")
        return sleeping


# Engines.


@dataclass(frozen=True)
class ActorWeights:
    """Weights of the actor in the same process."""

    model: "PreTrainedModel"
    must_gather: bool
    """The model is sharded or has an adapter, so its full weights exist only in `gathered_weights`."""


@dataclass(frozen=True)
class EngineContext:
    """Arguments for the start of an engine."""

    config: RolloutConfig
    model: ModelConfig
    """Initial model of the actor."""
    tokenizer: "PreTrainedTokenizerBase"
    device: str
    """Torch device of the process: `cpu` or `cuda:N`."""
    replica: ReplicaSizes = ONE_DEVICE
    """Parallel sizes of the devices that the engine uses."""
    followers: Sequence[Follower] = ()
    """Processes on the other nodes of the replica."""
    address: str = "127.0.0.1"
    """IP address of this process for the followers."""
    can_sleep: bool = False
    """Whether `sleep` will be called."""
    actor: ActorWeights | None = None
    """The actor, if it is in the same process."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates responses with weights that arrive in updates.

    A weight update is `begin_update`, `receive` once per bucket, and `commit`. `ServingState` implements its states.
    The process calls one method at a time.
    """

    capabilities: EngineCapabilities
    """Facts about the engine, as an attribute of the class. A run is checked and planned with them."""

    @classmethod
    def start(cls, context: EngineContext) -> "RolloutEngine":
        """Loads the initial weights of `context.model` and returns the engine."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights, initially 0."""
        ...

    @property
    def state(self) -> EngineState:
        """Current state."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Returns the response to each request, in order. With earlier segments, the response is the next segment.

        A response ends at a stop token, or when all of its segments together have `max_response_tokens` tokens. Random
        numbers depend on the position of a token in the response, so that segments do not repeat them.

        Raises PromptError if a prompt is empty or too long, and RolloutError unless the engine is serving.
        """
        ...

    def begin_update(self, version: int) -> None:
        """Begins an update to `version`. Running requests pause and continue with the new weights."""
        ...

    def receive(self, weights: "Mapping[str, np.ndarray]") -> None:
        """Loads some of the weights. `flowrl.engines.models.weights` describes the names and dtypes.

        The arrays are views of shared memory that are valid only during the call.
        """
        ...

    def commit(self) -> None:
        """Completes the update and drops cached keys and values of the old weights. Raises RolloutError if weights are
        missing.
        """
        ...

    def abort_update(self) -> None:
        """Abandons the update. The engine is broken until an update completes."""
        ...

    def compare_weights(self, samples: "WeightSamples") -> "Compared":
        """Compares the engine's weights with samples of the actor's weights."""
        ...


@runtime_checkable
class ColocatedEngine(Protocol):
    """An engine without `own_process`: it can run in a process of the actor."""

    def load_from(self, actor: "PreTrainedModel", version: int) -> None:
        """Sets the weights to those of the actor in this process, and the version. With shared weights, sets only the
        version. All ranks of a sharded actor call this together.
        """
        ...


@runtime_checkable
class GatheringEngine(Protocol):
    """A colocated engine that gathers the weights of a sharded actor for each call of `generate`."""

    def gathered_weights(self) -> AbstractContextManager[None]:
        """Inside the `with` block, all calls of `generate` use the same gathered weights. All ranks of the actor enter
        the block together. Inside the block, ranks may make different numbers of calls.
        """
        ...


@runtime_checkable
class RequestBatch(Protocol):
    """Requests that run across calls of `poll`."""

    @property
    def num_running(self) -> int:
        """Number of added requests whose responses `poll` has not yet returned."""
        ...

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests. Raises PromptError if a prompt is empty or too long."""
        ...

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Generates until a response has finished or the timeout has expired. Returns all finished responses."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drops the requests with these ids, and all state kept for requests that may follow. Ignores unknown ids."""
        ...


@runtime_checkable
class StreamingEngine(RequestBatch, Protocol):
    """An engine with `streaming`. Its own batch of requests continues across calls, also during weight updates."""


@runtime_checkable
class PartialResponses(Protocol):
    """A streaming engine whose responses can be read while they are generated."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        ...

    def read_partial(self, request_ids: Collection[str]) -> list[Response]:
        """Returns copies of the unfinished responses to these requests, which have `is_streamed`. Ignores unknown
        ids.
        """
        ...


@runtime_checkable
class BatchingEngine(Protocol):
    """An engine that can separate the requests of a caller from all others."""

    def open_batch(self) -> RequestBatch:
        """Returns an empty batch. Its `poll` returns responses to its own requests only. If the engine streams, its own
        `poll` returns none of them.
        """
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine with `sleep`: other processes use its device while it sleeps."""

    @property
    def asleep(self) -> frozenset[str]:
        """Subset of `TAGS` that is offloaded."""
        ...

    def sleep(self, *, keep_weights: bool = True) -> None:
        """Offloads all device memory. It may be called during an update.

        Without `keep_weights`, the engine may drop its weights, because a weight update precedes the next generation.
        """
        ...

    def wake(self, tags: Collection[str] = TAGS) -> None:
        """Restores the memory named by `tags`."""
        ...


@runtime_checkable
class PreemptingEngine(Protocol):
    """An engine that interrupts running responses if its KV cache is full, and later computes their keys and values
    again.
    """

    def pop_preemptions(self) -> int:
        """Returns the number of interruptions since the last call."""
        ...


@runtime_checkable
class RoutingEngine(Protocol):
    """An engine with `returns_routes`: its responses have routes if `rollout.router_replay` is set."""

    @property
    def no_routes(self) -> "np.ndarray | None":
        """An empty array of routes, [0, layers x experts per token]. None if responses have no routes."""
        ...


@runtime_checkable
class BroadcastEngine(Protocol):
    """An engine with the transport `nccl`. Its `receive` also accepts the `WeightMetadata` of a broadcast, and then
    receives the weights with a `BroadcastReceiver` on each device.
    """

    def join_transfer_group(self, group: "TransferGroup", first: int) -> None:
        """Creates the receiver of each device. Their indices are consecutive, starting at `first`."""
        ...


ENGINE_CLASSES = {"hf": "hf.engine:HfRollout", "vllm": "vllm.engine:VllmRollout"}
"""Name -> class of the included engines, relative to flowrl.engines.rollout."""


def load_engine_class(name: str) -> type[RolloutEngine]:
    """Imports the class of an engine, from its name or `module:Class`."""
    return import_attribute(f"flowrl.engines.rollout.{ENGINE_CLASSES[name]}" if name in ENGINE_CLASSES else name)


def check_engine_class(name: str) -> None:
    """Raises ConfigError if a user's engine lacks a method that its capabilities require."""
    if name not in ENGINE_CLASSES:
        check_members(f"rollout engine {name}", find_missing_methods(load_engine_class(name)))


def find_missing_methods(engine: type[RolloutEngine]) -> list[str]:
    """Returns the methods and properties that an engine lacks. Its capabilities determine the required protocols."""
    capabilities = engine.capabilities
    required: dict[type, bool] = {
        RolloutEngine: True,
        ColocatedEngine: not capabilities.own_process,
        RequestBatch: capabilities.streaming,
        SleepingEngine: capabilities.sleep,
        RoutingEngine: capabilities.returns_routes,
        BroadcastEngine: "nccl" in capabilities.gpu_transports,
    }
    return missing_members(engine, [protocol for protocol, is_required in required.items() if is_required])


def generate_in_batch(batch: RequestBatch, requests: Sequence[Request]) -> list[Response]:
    """Returns the response to each request, in order. `batch` is empty, and has no requests afterwards."""
    batch.add(requests)
    responses: dict[str, Response] = {}
    while batch.num_running:
        responses |= {response.request_id: response for response in batch.poll()}
    return [responses[request.request_id] for request in requests]


def open_batch(engine: RolloutEngine) -> RequestBatch:
    """Returns an empty batch of requests. Its `poll` returns only the responses to its own requests."""
    return engine.open_batch() if isinstance(engine, BatchingEngine) else GeneratedTogether(engine)


class GeneratedTogether:
    """Requests to an engine without `open_batch`. `poll` generates the responses to all requests at once."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._requests: dict[str, Request] = {}

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def add(self, requests: Iterable[Request]) -> None:
        self._requests |= {request.request_id: request for request in requests}

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Returns the responses to all requests. Ignores the timeout."""
        requests, self._requests = list(self._requests.values()), {}
        return self._engine.generate(requests) if requests else []

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)
