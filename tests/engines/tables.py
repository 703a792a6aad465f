"""Random batches of tokens, without importing transformers, so that processes of tests start fast."""

import torch
from tensordict import TensorDict

from flowrl.data.batch.tensordicts import make_tensordict

VOCABULARY = 32


def table(num_rows: int, seed: int = 0, longest: int = 12) -> TensorDict:
    """Returns random rows of 2 to `longest` tokens; the first token is the prompt, and some rows have no response."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (num_rows,), generator=generator)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.7
    mask[torch.cumsum(lengths, 0) - lengths] = False
    tokens = {
        "input_ids": torch.randint(2, VOCABULARY, (total,), generator=generator),
        "response_mask": mask,
        "weight": torch.rand(total, generator=generator, dtype=torch.float64),
    }
    return make_tensordict({"prompt_id": torch.arange(num_rows)}, tokens, lengths, num_rows)
