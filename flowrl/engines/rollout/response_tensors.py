"""Converts batches of prompts to requests, and responses to flat tensors.

Shape suffixes: N prompts of a call, T tokens of all responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.engines.rollout.base import Request, Response, Segment
from flowrl.engines.rollout.sampling import row_keys


@dataclass(frozen=True)
class Responses:
    """Responses to a batch of prompts, as CPU tensors in the order of the prompts."""

    tokens: Tensor
    """int64 [T], concatenated tokens of all responses, including stop tokens."""
    logprobs: Tensor
    """float32 [T], log-probability of each token under the distribution from which the token was sampled. 0 for tokens
    of an environment."""
    lengths: Tensor
    """int64 [N], number of tokens of each response with all segments, at least 1."""
    truncated: Tensor
    """bool [N], true if the response ended at the length limit, false if it ended at a stop token."""
    versions: Tensor
    """int32 [T], weight version that sampled each token. -1 for tokens of an environment."""

    @property
    def is_policy(self) -> Tensor:
        """bool [T], true for tokens that the policy sampled."""
        return self.versions >= 0

    def token_lists(self) -> list[list[int]]:
        """Returns one list of tokens per response."""
        return [row.tolist() for row in self.tokens.split(self.lengths.tolist())] if len(self.lengths) else []


def make_requests(
    prompt_ids: Sequence[Sequence[int]],
    prompt_id: Tensor,
    sample: Tensor,
    *,
    seed: int,
    temperature: float | None = None,
    may_continue: bool = False,
    name: str = "generate",
) -> list[Request]:
    """Returns requests with the ids `NAME-0`, `NAME-1`, ... for a batch of prompts.

    Args:
        prompt_ids: token ids of N non-empty prompts. A prompt with several samples is repeated.
        prompt_id: id of each prompt, int64 [N].
        sample: index of each row among the samples of its prompt, int64 [N].
        seed: random seed. Rows with equal (seed, prompt_id, sample) get equal random numbers.
        temperature: sampling temperature. 0 selects the most likely tokens. None uses the temperature of the settings.
        may_continue: whether an environment may continue the responses.
        name: prefix of the ids, which must differ between batches that run at the same time.
    """
    keys = row_keys(seed, prompt_id.cpu(), sample.cpu()).tolist()
    rows = enumerate(zip(prompt_ids, keys, strict=True))
    return [Request(f"{name}-{row}", ids, key, temperature, may_continue=may_continue) for row, (ids, key) in rows]


def stack_responses(responses: Sequence[Response], requests: Sequence[Request] | None = None) -> Responses:
    """Concatenates responses into flat tensors, in the same order.

    Args:
        responses: last segments of N responses.
        requests: requests of these segments. They contain the earlier segments. None if there are no earlier segments.
    """
    earlier = [()] * len(responses) if requests is None else [request.segments for request in requests]
    rows = [(*segments, Segment.policy(response)) for segments, response in zip(earlier, responses, strict=True)]
    flat = [segment for segments in rows for segment in segments]
    return Responses(
        torch.tensor([token for segment in flat for token in segment.token_ids], dtype=torch.int64),
        torch.tensor([x for segment in flat for x in _of_tokens(segment, segment.logprobs, 0.0)], dtype=torch.float32),
        torch.tensor([sum(len(segment.token_ids) for segment in segments) for segments in rows], dtype=torch.int64),
        torch.tensor([response.truncated for response in responses], dtype=torch.bool),
        torch.tensor([x for segment in flat for x in _of_tokens(segment, segment.versions, -1)], dtype=torch.int32),
    )


def _of_tokens(segment: Segment, values: Sequence[float] | None, missing: float) -> Sequence[float]:
    return [missing] * len(segment.token_ids) if values is None else values
