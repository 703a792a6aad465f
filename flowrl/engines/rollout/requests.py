"""Requests of rollout engines: a row that wants a response, and what it has been answered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.engines.rollout.responses import Responses, RolloutError
from flowrl.engines.rollout.sampling import row_keys


@dataclass(frozen=True)
class Prompt:
    """A row that wants a response."""

    name: str
    """Of the request; no two that are not answered have the same."""
    token_ids: Sequence[int]
    key: int
    """Keys the row's random numbers, see `sampling.row_keys`."""
    greedy: bool = False


@dataclass
class Response:
    """A response, as far as it has come."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that each token was sampled from."""
    truncated: bool = False
    """Ended by length and not by a stop."""


def prompts_of(
    prompt_ids: Sequence[Sequence[int]], prompt_id: Tensor, sample: Tensor, *, seed: int, greedy: bool = False
) -> list[Prompt]:
    """The rows of a batch as requests, named `generate-0` and so on; arguments as of `HfRollout.generate`."""
    keys = row_keys(seed, prompt_id.cpu(), sample.cpu()).tolist()
    rows = enumerate(zip(prompt_ids, keys, strict=True))
    return [Prompt(f"generate-{row}", ids, key, greedy) for row, (ids, key) in rows]


def refuse_running(names: Iterable[str], running: Iterable[str]) -> None:
    """Raises RolloutError for a name that a request has which is not answered yet, or that comes twice."""
    known = set(running)
    for name in names:
        if name in known:
            raise RolloutError(f"request {name} is running already; name it otherwise")
        known.add(name)


def responses_of(answers: Sequence[Response]) -> Responses:
    """Answers as flat tensors, in their order."""
    return Responses(
        torch.tensor([token for answer in answers for token in answer.token_ids], dtype=torch.int64),
        torch.tensor([value for answer in answers for value in answer.logprobs], dtype=torch.float32),
        torch.tensor([len(answer.token_ids) for answer in answers], dtype=torch.int64),
        torch.tensor([answer.truncated for answer in answers], dtype=torch.bool),
        torch.tensor([version for answer in answers for version in answer.versions], dtype=torch.int32),
    )
