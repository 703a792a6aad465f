"""What rollout engines give back, whichever generated it.

Shape suffixes: N rows of a call, T tokens of all responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from flowrl.config import UserError


class RolloutError(UserError):
    """A prompt cannot be answered by this model, or not by this engine."""


class PromptError(RolloutError):
    """One prompt of a call cannot, and `why` goes on after 'the prompt'; the others could."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(row, why)
        self.row, self.why = row, why

    def __str__(self) -> str:
        return f"prompt {self.row} {self.why}"


@dataclass(frozen=True)
class Responses:
    """What was generated, on the CPU, rows in the order of the prompts."""

    tokens: Tensor
    """int64 [T], flat: row i's are the next `lengths[i]`. A stop token or stop sequence is included."""
    logprobs: Tensor
    """float32 [T], under the distribution each token was sampled from (greedy: under the model's own)."""
    lengths: Tensor
    """int64 [N], each at least 1."""
    truncated: Tensor
    """bool [N], ended by length and not by a stop."""
    versions: Tensor
    """int32 [T], of the weights that each token was sampled from."""

    def ids(self) -> list[list[int]]:
        """The tokens as a list per row."""
        return [row.tolist() for row in self.tokens.split(self.lengths.tolist())] if len(self.lengths) else []


def end_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> list[int]:
    """The tokens that end a response: the tokenizer's and the model's."""
    ends = {tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set()
    of_model = None if generation is None else generation.eos_token_id
    return sorted(ends | ({of_model} if isinstance(of_model, int) else set(of_model or ())))


def check_prompts(prompt_ids: Sequence[Sequence[int]], max_response_tokens: int, max_length: int) -> None:
    """Refuses a prompt that has no token, or that is too long for the model with its response. Raises PromptError."""
    for row, prompt in enumerate(prompt_ids):
        if not len(prompt):
            raise PromptError(row, "has no tokens; a response needs at least one to follow")
        total = len(prompt) + max_response_tokens
        if total > max_length:
            raise PromptError(
                row,
                f"has {len(prompt)} tokens, {total} with max_response_tokens {max_response_tokens}, but the model "
                f"takes {max_length}; shorten one of them",
            )
