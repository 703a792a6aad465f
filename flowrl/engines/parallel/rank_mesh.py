"""The process groups of a role.

In the rank order, the tensor-parallel index varies fastest, then the sequence-parallel index, then the data-parallel
index. The ranks with the same tensor-parallel index are divided, in rank order, into `replicate` sets of `shard` ranks.
FSDP2 shards the weights over the ranks of a set, and all sets hold the same weights. Tensor parallelism additionally
shards each layer over `tp` ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from flowrl.devices.device import COLLECTIVE_TIMEOUT


@dataclass(frozen=True)
class RankMesh:
    """The process groups of one rank. The function `rank_mesh` creates them."""

    all_ranks: ProcessGroup | None
    """All ranks of the model. None for a single process."""
    data: ProcessGroup | None
    """Ranks over which gradients are summed. Each of these ranks has different rows or a different sequence shard."""
    sequence: ProcessGroup | None
    """Sequence-parallel ranks. None without sequence parallelism."""
    same_rows: ProcessGroup | None
    """Ranks with the same rows. Their data-parallel index is equal. None for a single process."""
    devices: DeviceMesh | None
    """Device mesh with the dimensions `replicate`, `shard` and `tp`. None for a single process."""
    tp: int
    is_row_leader: bool
    """Whether this rank reports the row count for all ranks of `same_rows`. True if its tensor- and sequence-parallel
    index is 0.
    """
    experts: ProcessGroup | None = None
    """Ranks that share a copy of the model and exchange tokens of experts. None without expert parallelism."""

    def sum(self, values: Tensor) -> Tensor:
        """Sums the values elementwise over all ranks, in place."""
        if self.all_ranks is not None:
            distributed.all_reduce(values, group=self.all_ranks)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Returns the values of every rank, [num_ranks, ...]."""
        if self.all_ranks is None:
            return values[None]
        gathered = [torch.empty_like(values) for _ in range(self.all_ranks.size())]
        distributed.all_gather(gathered, values, group=self.all_ranks)
        return torch.stack(gathered)


SINGLE_PROCESS = RankMesh(
    all_ranks=None, data=None, sequence=None, same_rows=None, devices=None, tp=1, is_row_leader=True
)
"""Mesh of a role with one process, whose model FSDP2 does not shard."""


def rank_mesh(
    group: ProcessGroup | None,
    *,
    device: torch.device | str,
    tp: int = 1,
    sp: int = 1,
    shard_ranks: int | None = None,
    expert_parallel: bool = False,
) -> RankMesh:
    """Creates the process groups of a role. All ranks of `group` must call this together.

    Args:
        group: ranks of the role. None for a single process without FSDP2.
        device: device of the model.
        tp: number of tensor-parallel ranks.
        sp: number of sequence-parallel ranks.
        shard_ranks: number of data-parallel ranks over which one copy of the model is sharded. None means all.
        expert_parallel: whether the ranks of a copy exchange tokens of experts.
    Raises ValueError if tp x sp does not divide the number of ranks, or if shard_ranks does not divide dp.
    """
    if group is None:
        return SINGLE_PROCESS
    dp, rest = divmod(group.size(), tp * sp)
    shard = dp if shard_ranks is None else shard_ranks
    if rest or dp % shard:
        raise ValueError(
            f"{group.size()} ranks are not a multiple of tp {tp} x sp {sp}"
            if rest
            else f"shard_ranks is {shard}, which does not divide the {dp} data-parallel ranks"
        )
    align_group_counts(group, device)
    ranks_DST = torch.tensor(distributed.get_process_group_ranks(group)).view(dp, sp, tp)
    own_d, own_s, own_t = (int(x) for x in (ranks_DST == distributed.get_rank()).nonzero()[0])
    ranks_RST = ranks_DST.view(dp // shard, shard * sp, tp)
    own_r, own_shard = divmod(own_d * sp + own_s, shard * sp)
    groups = {tuple(ranks_DST.flatten().tolist()): group}

    def shared_group(ranks: Tensor) -> ProcessGroup:
        """Returns the group of these ranks. Creates equal groups once, because NCCL allocates buffers per group."""
        key = tuple(ranks.flatten().tolist())
        if key not in groups:
            groups[key] = create_group(key)
        return groups[key]

    dimensions = [shared_group(ranks_RST[:, own_shard, own_t]), shared_group(ranks_RST[own_r, :, own_t])]
    dimensions.append(shared_group(ranks_RST[own_r, own_shard]))
    # Its own group, because in the group of the shards, attention would wait until FSDP2 has gathered the next layer's
    # weights.
    sequence = create_group(ranks_DST[own_d, :, own_t].tolist()) if sp > 1 else None
    # A group of its own, because exchanges of tokens would otherwise wait for FSDP2's gathers.
    experts = create_group(ranks_RST[own_r, :, own_t].tolist()) if expert_parallel else None
    both = create_group(ranks_DST[own_d].flatten().tolist()) if sp > 1 and tp > 1 else None
    return RankMesh(
        all_ranks=group,
        data=shared_group(ranks_DST[:, :, own_t]),
        sequence=sequence,
        same_rows=both or sequence or dimensions[-1],
        devices=DeviceMesh.from_group(
            dimensions,
            torch.device(device).type,
            mesh=ranks_RST,
            mesh_dim_names=("replicate", "shard", "tp"),
        ),
        tp=tp,
        is_row_leader=own_s == 0 and own_t == 0,
        experts=experts,
    )


def align_group_counts(group: ProcessGroup, device: torch.device | str) -> None:
    """Creates dummy groups until all ranks have created the same number of groups. torch derives group names from this
    number.
    """
    own = torch.tensor([len(_world.pg_names)], device=device)
    most = own.clone()
    distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group)
    for _ in range(int(own), int(most)):
        create_group([distributed.get_rank()])


def create_group(ranks: Sequence[int]) -> ProcessGroup:
    """Creates a process group. Only ranks of the new group call this."""
    created = distributed.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True)
    assert isinstance(created, ProcessGroup), "this rank is a member of the group"
    return created
