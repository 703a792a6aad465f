"""Load-balancing loss of the routers of a mixture of experts.

Shape suffixes: N tokens of a part of the batch, K experts of a token, E experts.
"""

from typing import Literal

import torch
from torch import Tensor


def router_probabilities(logits: Tensor, *, scores: Literal["softmax", "sigmoid"]) -> Tensor:
    """Returns the probabilities of the experts, [N, E] in at least float32.

    Args:
        logits: [N, E], outputs of a router.
        scores: function of the router. Sigmoids are divided by their sum.

    Sigmoids: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, eq. (19).
    """
    logits_NE = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scores == "softmax":
        return logits_NE.softmax(-1)
    scores_NE = logits_NE.sigmoid()
    return scores_NE / scores_NE.sum(-1, keepdim=True)


def count_routes(experts: Tensor, mask: Tensor, *, num_experts: int) -> Tensor:
    """Returns the number of tokens of each expert, int64 [E].

    Args:
        experts: int64 [N, K], experts of each token.
        mask: bool [N], true for tokens that count.
        num_experts: number of experts.
    """
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return counts_E.index_add_(0, experts.flatten(), mask.long().repeat_interleave(experts.shape[1]))


def load_balance_loss(probabilities: Tensor, counts: Tensor, mask: Tensor, *, num_tokens: Tensor | float) -> Tensor:
    """Returns the term of N tokens of a layer's load-balancing loss. The terms of all tokens of a batch sum up to it.

        L = E sum_e f_e P_e,   f_e = counts_e / T,   P_e = (sum of the probabilities of e over the T tokens) / T

    It is K, the number of experts of a token, if all experts have equal probabilities or equal loads.

    Args:
        probabilities: [N, E], from `router_probabilities`. Receives the gradient.
        counts: [E], from `count_routes` over all T tokens of the batch. Receives no gradient.
        mask: bool [N], true for tokens that count.
        num_tokens: number T of tokens of the batch, > 0.
    Returns: a scalar.

    Fedus et al. 2022, https://arxiv.org/abs/2101.03961, eq. (4) to (6), with K experts per token as in Mixtral.
    f over the global batch: Qiu et al. 2025, https://arxiv.org/abs/2501.11873.
    """
    sums_E = probabilities.masked_fill(~mask[:, None], 0).sum(0)
    shares_E = (counts.double() / num_tokens).to(sums_E.dtype)
    return counts.shape[0] * (shares_E * sums_E / num_tokens).sum()
