"""From a model and a micro-batch to per-token quantities. Shapes: B rows, L the longest row."""

import torch
from torch import nn

from flowrl.algorithms import token_entropy, token_logprobs
from flowrl.engines.microbatch import MicroBatch
from flowrl.engines.models import policy_logits


def policy_logprobs(model: nn.Module, micro: MicroBatch, temperature: float) -> torch.Tensor:
    """Log-probability `[B, L]` of every token given those before it; 0 at position 0."""
    return token_logprobs(policy_logits(model, micro.input_ids), micro.input_ids, temperature=temperature)


def policy_logprobs_and_entropy(
    model: nn.Module, micro: MicroBatch, temperature: float, *, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities, and the entropy `[B, L]` of the distribution that each token was drawn from."""
    logits = policy_logits(model, micro.input_ids)
    logprobs = token_logprobs(logits, micro.input_ids, temperature=temperature)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = token_entropy(logits, temperature=temperature)
    return logprobs, entropy
