"""Muon: updates with orthogonalized momentum for the matrices of a model's layers.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, with the update scale of Liu et al. 2025,
https://arxiv.org/abs/2502.16982, section 2.2: updates have the root mean square of AdamW's, so that both share one
learning rate and weight decay.

The orthogonalization needs a full matrix. The ranks of a sharded model divide the matrices among themselves: each rank
collects the shards of its matrices, and returns the shards of their updates. Shape suffixes: R rows, C columns.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from flowrl.devices.device import local_tensor
from flowrl.engines.parallel.rank_mesh import RankMesh

NUM_ITERATIONS = 5
"""Number of Newton-Schulz iterations."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b and c of a s + b s^3 + c s^5. An iteration applies this polynomial to the singular values s, which
are at most 1 in the first iteration, and between about 0.7 and 1.2 after the last one."""

_EPS = 1e-7
_SCALE = 0.2
"""Root mean square of an update, relative to the learning rate."""


def orthogonalize(matrix_RC: Tensor) -> Tensor:
    """Returns an approximation of U V^T for a matrix U S V^T, [R, C]. Its singular values are about 0.7 to 1.2.

    Each Newton-Schulz iteration maps the singular values s to a s + b s^3 + c s^5. The first receives the matrix
    divided by its Frobenius norm. Computes in the dtype of the matrix.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix_RC.shape[0] > matrix_RC.shape[1]
    update = matrix_RC.mT if is_tall else matrix_RC
    update = update / update.norm().clamp(min=_EPS)
    for _ in range(NUM_ITERATIONS):
        gram = update @ update.mT
        update = torch.addmm(update, torch.addmm(gram, gram, gram, beta=b, alpha=c), update, beta=a)
    return update.mT if is_tall else update


class Muon(AdamW):
    """Muon for the groups of weights with `momentum`, and AdamW for all others."""

    def __init__(
        self, groups: Sequence[dict], mesh: RankMesh, *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        """Groups whose `momentum` is not None may contain only matrices. `mesh`: ranks that share the weights."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._mesh = mesh

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Takes a step, and frees the gradients of the matrices."""
        matrices: list[nn.Parameter] = []
        updates: list[Tensor] = []
        rates: dict[nn.Parameter, tuple[float, float]] = {}
        for group in self.param_groups:
            if group["momentum"] is None:
                continue
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                matrices.append(weight)
                updates.append(self._average(weight, group["momentum"]))
                rates[weight] = group["lr"], group["weight_decay"]
                weight.grad = None  # AdamW ignores weights without gradient
        for weight, update in orthogonalize_shards(matrices, updates, self._mesh):
            lr, weight_decay = rates[weight]
            shard = local_tensor(weight.detach())
            shard.mul_(1 - lr * weight_decay)
            shard.add_(update.to(shard), alpha=-lr * _SCALE * math.sqrt(max(weight.shape)))
        super().step()

    def _average(self, weight: nn.Parameter, momentum: float) -> Tensor:
        """Updates the momentum of a weight, overwrites its gradient with the Nesterov average, and returns this rank's
        shard of it.
        """
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["step"] = torch.zeros(())  # torch's AdamW requires it when it loads a state
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["step"] += 1
        gradient, average = local_tensor(weight.grad), local_tensor(state["momentum_buffer"])
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp_(average, momentum)


def compute_dtype(weight: Tensor, device_type: str) -> torch.dtype:
    """Returns the dtype of the orthogonalization: bfloat16 on GPUs, as in the code of Muon's authors, and at least
    float32 on CPUs. float64 stays float64.
    """
    if weight.dtype == torch.float64 or device_type == "cpu":
        return torch.promote_types(weight.dtype, torch.float32)
    return torch.bfloat16


def orthogonalize_shards(
    weights: Sequence[nn.Parameter], updates: Sequence[Tensor], mesh: RankMesh
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each matrix with this rank's shard of its orthogonalized update. All ranks call this together.

    Args:
        weights: matrices, possibly sharded, in the same order on all ranks.
        updates: shards of their updates on this rank.
        mesh: ranks of the model.
    """
    sharded = [i for i, weight in enumerate(weights) if isinstance(weight, DTensor)]
    for i in sorted(set(range(len(weights))) - set(sharded)):
        dtype = compute_dtype(weights[i], weights[i].device.type)
        yield weights[i], orthogonalize(updates[i].to(dtype))
    if not sharded:
        return
    exchange = _Exchange.of(mesh)
    # Matrices of one round have about the same size, so that the ranks finish together.
    sharded.sort(key=lambda i: (str(weights[i].dtype), -weights[i].numel()))
    for dtype in dict.fromkeys(weights[i].dtype for i in sharded):
        own = [i for i in sharded if weights[i].dtype == dtype]
        for start in range(0, len(own), exchange.num_ranks):
            part = own[start : start + exchange.num_ranks]
            shards = exchange.orthogonalize([weights[i] for i in part], [updates[i] for i in part])
            yield from zip([weights[i] for i in part], shards, strict=True)


@dataclass(frozen=True)
class _Exchange:
    """All-to-all exchanges of shards, in which rank i of the model owns the i-th matrix of a round."""

    group: distributed.ProcessGroup
    device: torch.device
    coordinates: Sequence[Mapping[str, tuple[int, int]]]
    """Position of each rank of `group` in the mesh: dimension -> (index of the rank, size of the dimension)."""
    rank: int

    @classmethod
    def of(cls, mesh: RankMesh) -> "_Exchange":
        assert mesh.devices is not None and mesh.all_ranks is not None, "a sharded model has a mesh"
        names, sizes = mesh.devices.mesh_dim_names, mesh.devices.mesh.shape
        assert names is not None
        indices = itertools.product(*map(range, sizes))  # the ranks of the group are in this order
        coordinates = [dict(zip(names, zip(index, sizes, strict=True), strict=True)) for index in indices]
        return cls(mesh.all_ranks, torch.device(mesh.devices.device_type), coordinates, mesh.all_ranks.rank())

    @property
    def num_ranks(self) -> int:
        return len(self.coordinates)

    def orthogonalize(self, weights: Sequence[nn.Parameter], updates: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalizes the updates of at most `num_ranks` matrices. Returns this rank's shard of each result."""
        dtype = compute_dtype(weights[0], self.device.type)
        # If there are several copies of the weights, an owner collects the shards of its own copy.
        sent = [
            update.to(self.device, dtype).flatten() if self._shares_copy(weight, self.rank, owner) else None
            for owner, (weight, update) in enumerate(zip(weights, updates, strict=True))
        ]
        if self.rank >= len(weights):
            self._all_to_all(sent, [], dtype)
            returned = self._all_to_all([], [update.numel() for update in updates], dtype)
        else:
            weight = weights[self.rank]
            full = torch.empty(weight.shape, dtype=dtype, device=self.device)
            shards = [self._shard(full, weight, rank) for rank in range(self.num_ranks)]
            is_source = [self._shares_copy(weight, self.rank, rank) for rank in range(self.num_ranks)]
            sizes = [shard.numel() if own else 0 for shard, own in zip(shards, is_source, strict=True)]
            for shard, own, part in zip(shards, is_source, self._all_to_all(sent, sizes, dtype), strict=True):
                if own:
                    shard.copy_(part.view_as(shard))
            full.copy_(orthogonalize(full))
            returned = self._all_to_all(
                [shard.flatten() for shard in shards], [update.numel() for update in updates], dtype
            )
        return [part.view_as(update) for part, update in zip(returned, updates, strict=False)]

    def _shares_copy(self, weight: nn.Parameter, rank: int, other: int) -> bool:
        """Returns whether the shards of two ranks belong to the same copy of a weight."""
        sharding, others = _sharded_dimensions(weight), self.coordinates[other]
        return all(index == others[name] for name, index in self.coordinates[rank].items() if name not in sharding)

    def _shard(self, full: Tensor, weight: nn.Parameter, rank: int) -> Tensor:
        """Returns the part of a full matrix that is the shard of a rank, as a view.

        FSDP2 shards what tensor parallelism leaves to a rank, so the dimension `tp` comes first.
        """
        part = full
        for name, dimension in sorted(_sharded_dimensions(weight).items(), key=lambda item: item[0] != "tp"):
            index, size = self.coordinates[rank][name]
            chunks = part.chunk(size, dimension)
            part = chunks[index] if index < len(chunks) else part.narrow(dimension, 0, 0)
        return part

    def _all_to_all(self, parts: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Sends `parts[i]` to rank i, and returns the parts from all ranks. `sizes[i]`: number of values from rank i.

        Missing parts and sizes are empty.
        """
        empty = torch.empty(0, dtype=dtype, device=self.device)
        own = [empty if part is None else part for part in parts] + [empty] * (self.num_ranks - len(parts))
        expected = [*sizes, *[0] * (self.num_ranks - len(sizes))]
        received = torch.empty(sum(expected), dtype=dtype, device=self.device)
        distributed.all_to_all_single(
            received, torch.cat(own), expected, [part.numel() for part in own], group=self.group
        )
        return list(received.split(expected))


def _sharded_dimensions(weight: nn.Parameter) -> dict[str, int]:
    """Returns the dimensions of the mesh that shard a matrix: name -> sharded dimension of the matrix."""
    assert isinstance(weight, DTensor)
    names = weight.device_mesh.mesh_dim_names
    assert names is not None
    placements = zip(names, weight.placements, strict=True)
    # torch's strided shards, of `tp` with FSDP2, are no `Shard`.
    return {name: getattr(placement, "dim") for name, placement in placements if not placement.is_replicate()}  # noqa: B009 (untyped)
