"""Random batches of tokens, without importing transformers, so that processes of tests start fast."""

import torch
from tensordict import TensorDict, TensorDictBase

from flowrl.data.batch.tensordicts import lengths, make_tensordict

VOCABULARY = 32


def table(num_rows: int, seed: int = 0, longest: int = 12) -> TensorDict:
    """Returns random rows of 2 to `longest` tokens; the first token is the prompt, and some rows have no response."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(2, longest + 1, (num_rows,), generator=generator)
    total = int(lengths_B.sum())
    mask = torch.rand(total, generator=generator) < 0.7
    mask[torch.cumsum(lengths_B, 0) - lengths_B] = False
    tokens = {
        "input_ids": torch.randint(2, VOCABULARY, (total,), generator=generator),
        "response_mask": mask,
        "weight": torch.rand(total, generator=generator, dtype=torch.float64),
    }
    return make_tensordict({"prompt_id": torch.arange(num_rows)}, tokens, lengths_B, num_rows)


def take_rows(batch: TensorDictBase, index_N: torch.Tensor) -> TensorDict:
    """Returns the rows `index_N` and their tokens, in this order."""
    selected = {name: batch["rows"].get(name)[index_N] for name in batch["rows"].keys()}  # noqa: SIM118 (a TensorDict)
    rows = TensorDict(selected, batch_size=[len(index_N)])
    if not len(batch["tokens"].keys()):
        return TensorDict({"rows": rows, "tokens": TensorDict({}, batch_size=[0])}, batch_size=[])
    lengths_B = lengths(batch)
    starts = (torch.cumsum(lengths_B, 0) - lengths_B)[index_N]
    lengths_N = lengths_B[index_N]
    offsets_N = torch.cumsum(lengths_N, 0) - lengths_N
    positions = torch.repeat_interleave(starts - offsets_N, lengths_N) + torch.arange(int(lengths_N.sum()))
    return TensorDict({"rows": rows, "tokens": batch["tokens"][positions]}, batch_size=[])
