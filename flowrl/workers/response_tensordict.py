"""Responses as the table that a rollout gives back: prompt and response as one row of tokens."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.rollout.responses import Responses

RESPONSE_COLUMNS = ("input_ids", "response_mask", "rollout_logprobs", "weight_version", "truncated", "response")


def response_table(
    prompts: Sequence[Sequence[int]], answers: Responses, tokenizer: ChatTokenizer, **columns: torch.Tensor
) -> TensorDict:
    """The `RESPONSE_COLUMNS` of B rows.

    Args:
        prompts: B prompts as token ids.
        answers: their responses.
        tokenizer: makes text of them.
        columns: row columns besides, [B] each.
    """
    responses = answers.ids()
    prompt_lengths_B = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    lengths_B = prompt_lengths_B + answers.lengths
    rows_T = torch.repeat_interleave(torch.arange(len(prompts)), lengths_B)
    positions_T = torch.arange(len(rows_T)) - (torch.cumsum(lengths_B, 0) - lengths_B)[rows_T]
    mask_T = positions_T >= prompt_lengths_B[rows_T]
    input_ids_T = torch.empty(len(rows_T), dtype=torch.int64)
    input_ids_T[mask_T] = answers.tokens
    input_ids_T[~mask_T] = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
    tokens = {
        "input_ids": input_ids_T,
        "response_mask": mask_T,
        "rollout_logprobs": torch.zeros(len(rows_T)).masked_scatter(mask_T, answers.logprobs.float()),
        "weight_version": torch.full_like(mask_T, -1, dtype=torch.int32).masked_scatter(mask_T, answers.versions),
    }
    rows = {"truncated": answers.truncated, "response": [tokenizer.decode(ids) for ids in responses]}
    return make_tensordict({**rows, **columns}, tokens, lengths_B)
