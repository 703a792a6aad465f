"""A loss for tests of engines, and a model that does not use transformers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flowrl.data.metric import Mean, Metric
from flowrl.engines.train.base import Denominators, Outputs
from flowrl.engines.train.microbatch import MicroBatch

LOGPROBS = Outputs(("logprobs",), "response_mask")


class Bigram(nn.Module):
    """Logits from this token and the mean of those before it; the layer `unused` is never reached."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.output = nn.Linear(width, vocabulary)
        self.unused = nn.Linear(width, width)

    def forward(self, input_ids_BL: Tensor) -> Tensor:
        hidden_BLD = self.embedding(input_ids_BL)
        counts_L1 = torch.arange(1, hidden_BLD.shape[1] + 1)[:, None]
        return self.output(torch.tanh(hidden_BLD + hidden_BLD.cumsum(1) / counts_L1))


def bigram_outputs(model: nn.Module, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    return {"logprobs": logprobs(model(micro.input_ids), micro.input_ids)}


def policy_logits(model: nn.Module, input_ids_BL: Tensor) -> Tensor:
    return model(input_ids=input_ids_BL, use_cache=False).logits


def logprobs(logits_BLV: Tensor, input_ids_BL: Tensor) -> Tensor:
    """Returns the log-probability of each token; 0 at position 0."""
    chosen_BL = logits_BLV[:, :-1].log_softmax(-1).gather(-1, input_ids_BL[:, 1:, None]).squeeze(-1)
    return nn.functional.pad(chosen_BL, (1, 0))


def weighted_loss(logprobs_BL: Tensor, micro: MicroBatch, counts: Denominators) -> tuple[Tensor, dict[str, Metric]]:
    """Returns the sum of a token mean and a row mean, so that both denominators matter."""
    mask_BL = micro.tokens["response_mask"]
    losses_BL = -(logprobs_BL * micro.tokens["weight"]).masked_fill(~mask_BL, 0)
    row_means_B = losses_BL.sum(-1) / mask_BL.sum(-1).clamp(min=1)
    loss = losses_BL.sum() / counts.tokens + row_means_B.sum() / counts.rows
    return loss, {"loss": Mean(losses_BL.sum().item(), mask_BL.sum().item())}


def bigram_loss(
    values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    return weighted_loss(values["logprobs"], micro, counts)
