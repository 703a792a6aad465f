"""ZeRO-1: each rank of a replicated model updates a part of the weights, and sends them to the other ranks.

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5.1, with whole weights as parts. Each rank has the
full sum of the gradients, so the gradient norm needs no communication.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from flowrl.engines.parallel.gradients import BUCKET_BYTES


def assign_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assigns each weight to the rank that updates it, and returns these ranks in the order of `sizes` (bytes).

    Assigns the largest weights first, each to the rank with the fewest bytes so far.
    """
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(num_ranks), key=loads.__getitem__)
        loads[owners[i]] += sizes[i]
    return owners


class WeightOwners:
    """Assigns each weight of a replicated model to the rank that updates it. All ranks must pass the same weights."""

    def __init__(self, weights: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self._group = group
        self._owned: list[list[nn.Parameter]] = [[] for _ in range(group.size())]
        sizes = [weight.nbytes for weight in weights]
        for weight, owner in zip(weights, assign_owners(sizes, group.size()), strict=True):
            self._owned[owner].append(weight)

    def restrict(self, optimizer: Optimizer) -> None:
        """Removes the weights of other ranks, and then empty groups, from an optimizer without state."""
        own = {id(weight) for weight in self._owned[self._group.rank()]}
        for group in optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if id(weight) in own]
        # torch restores at most one empty group, so empty groups are removed. One group remains, because an optimizer
        # needs a group.
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]] or [
            optimizer.param_groups[0]
        ]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Broadcasts each weight from its owner to all other ranks, in place."""
        for owner, weights in enumerate(self._owned):
            for bucket in _buckets(weights):
                values = torch.cat([weight.flatten() for weight in bucket])
                distributed.broadcast(values, group=self._group, group_src=owner)
                if owner != self._group.rank():
                    sizes = [weight.numel() for weight in bucket]
                    for weight, part in zip(bucket, values.split(sizes), strict=True):
                        weight.copy_(part.view_as(weight))


def _buckets(weights: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """Divides weights into buckets of one dtype and at most `BUCKET_BYTES`. A larger weight gets its own bucket."""
    buckets: list[list[Tensor]] = []
    num_bytes = 0
    for weight in sorted(weights, key=lambda weight: str(weight.dtype)):
        num_bytes += weight.nbytes
        if not buckets or buckets[-1][0].dtype != weight.dtype or num_bytes > BUCKET_BYTES:
            buckets.append([])
            num_bytes = weight.nbytes
        buckets[-1].append(weight)
    return buckets
