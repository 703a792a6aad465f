"""Inputs of a loss that a language model computes.

Shape suffixes: B rows, L tokens of the longest row of a micro-batch, D hidden size, K candidate tokens of a position.
"""

from torch import Tensor, nn

from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.losses.loss import TOPK_IDS, TOPK_LOGPROBS, Loss

COMPUTED = ("logprobs", "entropy", "hidden", TOPK_LOGPROBS, TOPK_IDS)


def policy_inputs(
    model: nn.Module, micro: MicroBatch, mask_BL: Tensor, loss: Loss, *, temperature: float
) -> dict[str, Tensor]:
    """Returns those inputs of a loss that a `PolicyModel` computes.

        logprobs        log-probability of each token given the previous tokens, [B, L]
        entropy         entropy of the distribution of each token, [B, L], in nats
        topk_logprobs   log-probabilities of the candidate tokens at each position, [B, L, K]
        topk_ids        most likely tokens of the model, int64 [B, L, K], if the loss sets topk
        hidden          last hidden state after each token, [B, L, D], in the dtype of the model

    All inputs are 0 where the mask is false. Hidden states are 0 only at padding. No gradient flows through these
    tokens, even if the loss is NaN there.

    Args:
        model: a `PolicyModel`.
        micro: the micro-batch.
        mask_BL: mask of the trained tokens.
        loss: the loss.
        temperature: sampling temperature of the rollout, unless the loss sets another.
    """
    names = loss.computed_inputs(COMPUTED)
    entropy = "none" if "entropy" not in names else "value" if "entropy" in loss.detached else "gradient"
    topk = loss.topk
    if TOPK_LOGPROBS in names and not topk:
        topk = micro.tokens[loss.columns.get(TOPK_IDS, TOPK_IDS)].long()
    output = model(
        micro.input_ids,
        mask_BL,
        temperature if loss.temperature is None else loss.temperature,
        entropy,
        micro.pack,
        topk=topk,
        has_hidden="hidden" in names,
    )
    values: dict[str, Tensor] = {name: getattr(output, name) for name in names}
    for name, value in values.items():
        mask = micro.mask if name == "hidden" else mask_BL
        masked = value.masked_fill(~mask.view(*mask.shape, *[1] * (value.dim() - 2)), 0)
        values[name] = masked.detach() if name in loss.detached else masked
    return values
