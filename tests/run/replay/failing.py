"""A KL estimate that fails."""

import torch


def fail(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    reason = "the estimate fails"
    raise RuntimeError(reason)
