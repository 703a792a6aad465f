"""Requests, responses and the engine state that all rollout engines share.

Shape suffixes: N prompts of a call, T tokens of all responses.
"""

import enum
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from flowrl.config import UserError
from flowrl.engines.rollout.sampling import row_keys


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
class Request:
    """A prompt for which the engine generates one response."""

    request_id: str
    """Request id, which is unique among all unfinished requests."""
    token_ids: Sequence[int]
    key: int
    """Random-number key of the request, from `sampling.row_keys`."""
    greedy: bool = False


@dataclass
class Response:
    """Response to a request. It is partial until the request has finished."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Weight version that sampled each token, one per token."""
    truncated: bool = False
    """True if the response ended at the length limit. False if it ended at a stop token."""


@dataclass(frozen=True)
class Responses:
    """Responses to a batch of prompts, as CPU tensors in the order of the prompts."""

    tokens: Tensor
    """int64 [T], concatenated tokens of all responses, including stop tokens."""
    logprobs: Tensor
    """float32 [T], log-probability of each token under the distribution from which the token was sampled."""
    lengths: Tensor
    """int64 [N], number of tokens of each response, at least 1."""
    truncated: Tensor
    """bool [N], true if the response ended at the length limit, false if it ended at a stop token."""
    versions: Tensor
    """int32 [T], weight version that sampled each token."""

    def token_lists(self) -> list[list[int]]:
        """Returns one list of tokens per response."""
        return [row.tolist() for row in self.tokens.split(self.lengths.tolist())] if len(self.lengths) else []


def make_requests(
    prompt_ids: Sequence[Sequence[int]], prompt_id: Tensor, sample: Tensor, *, seed: int, greedy: bool = False
) -> list[Request]:
    """Returns requests with the ids `generate-0`, `generate-1`, ... for a batch of prompts. The arguments are those of
    `generate`.
    """
    keys = row_keys(seed, prompt_id.cpu(), sample.cpu()).tolist()
    rows = enumerate(zip(prompt_ids, keys, strict=True))
    return [Request(f"generate-{row}", ids, key, greedy) for row, (ids, key) in rows]


def stack_responses(responses: Sequence[Response]) -> Responses:
    """Concatenates responses into flat tensors, in the same order."""
    return Responses(
        torch.tensor([token for response in responses for token in response.token_ids], dtype=torch.int64),
        torch.tensor([logprob for response in responses for logprob in response.logprobs], dtype=torch.float32),
        torch.tensor([len(response.token_ids) for response in responses], dtype=torch.int64),
        torch.tensor([response.truncated for response in responses], dtype=torch.bool),
        torch.tensor([version for response in responses for version in response.versions], dtype=torch.int32),
    )


def check_request_ids(new: Iterable[str], running: Iterable[str]) -> None:
    """Raises RolloutError if a new request id is a duplicate or belongs to an unfinished request."""
    known = set(running)
    for request_id in new:
        if request_id in known:
            raise RolloutError(f"request {request_id} is already running: use another id")
        known.add(request_id)


def check_prompts(prompt_ids: Sequence[Sequence[int]], max_response_tokens: int, max_length: int) -> None:
    """Raises PromptError if a prompt is empty, or if prompt and response together can exceed `max_length` tokens."""
    for row, prompt in enumerate(prompt_ids):
        if not len(prompt):
            raise PromptError(row, "has no tokens: a prompt needs at least one")
        total = len(prompt) + max_response_tokens
        if total > max_length:
            raise PromptError(
                row,
                f"has {len(prompt)} tokens, {total} with max_response_tokens {max_response_tokens}, but the model's "
                f"limit is {max_length}: shorten one of them",
            )


def eos_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> list[int]:
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
    """A weight update failed midway. The engine has weights of two versions until an update completes."""


_FIX = {
    EngineState.SERVING: "begin an update first",
    EngineState.UPDATING: "commit or abort the update first",
    EngineState.ASLEEP: "wake it up first",
    EngineState.BROKEN: "it holds weights of two versions: send a complete update",
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
        except BaseException:
            self._state_awake = EngineState.BROKEN
            raise

    # Sleep.

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
