"""The ranks that hold one model between them, and which of them talk to each other.

Ranks are numbered as placements number them: tensor-parallel peers next to each other, then sequence-parallel peers,
then data-parallel ranks. A model is cut into `shard` parts over consecutive data-parallel and sequence-parallel ranks,
and copied `replicate` times; each part may be cut again over `tp` ranks, layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world


@dataclass(frozen=True)
class RankMesh:
    """Make one with `rank_mesh`, or take `ALONE`."""

    everyone: ProcessGroup | None
    """All ranks of the model; None is this process alone."""
    data: ProcessGroup | None
    """Ranks whose gradients are parts of one sum: those that differ in rows, or in the part of a sequence."""
    sequence: ProcessGroup | None
    """Ranks that share each sequence."""
    peers: ProcessGroup | None
    """Ranks that have the same rows: those that differ in tp or sp only, tp first."""
    devices: DeviceMesh | None
    """Of dimensions `replicate`, `shard` and `tp`."""
    tp: int
    counts_rows: bool
    """Whether this rank answers for its rows: ranks that differ in tp or sp only have the same ones."""

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over all ranks, in place."""
        if self.everyone is not None:
            distributed.all_reduce(values, group=self.everyone)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """The values of every rank, [ranks, ...]."""
        if self.everyone is None:
            return values[None]
        found = [torch.empty_like(values) for _ in range(self.everyone.size())]
        distributed.all_gather(found, values, group=self.everyone)
        return torch.stack(found)


ALONE = RankMesh(everyone=None, data=None, sequence=None, peers=None, devices=None, tp=1, counts_rows=True)
"""A process that shares its model with no other."""


def rank_mesh(
    group: ProcessGroup | None, *, device: torch.device | str, tp: int = 1, sp: int = 1, shard_ranks: int | None = None
) -> RankMesh:
    """Groups the ranks of a role. Every rank of the group calls it at the same time.

    Args:
        group: the role's ranks; None is this process alone.
        device: of the model.
        tp: ranks that share each layer.
        sp: ranks that share each sequence.
        shard_ranks: data-parallel ranks that hold one copy of the model between them; None is all.
    Raises:
        ValueError: the sizes do not divide the ranks.
    """
    if group is None or group.size() == 1:
        return ALONE
    dp, rest = divmod(group.size(), tp * sp)
    shard = dp if shard_ranks is None else shard_ranks
    if rest or dp % shard:
        raise ValueError(
            f"{group.size()} ranks are no multiple of tp {tp} x sp {sp}"
            if rest
            else f"shard_ranks is {shard}, which does not divide the {dp} data-parallel ranks"
        )
    _level(group, device)
    ranks_DST = torch.tensor(distributed.get_process_group_ranks(group)).view(dp, sp, tp)
    own_d, own_s, own_t = (int(x) for x in (ranks_DST == distributed.get_rank()).nonzero()[0])
    ranks_RST = ranks_DST.view(dp // shard, shard * sp, tp)
    own_r, own_part = divmod(own_d * sp + own_s, shard * sp)
    dimensions = [_group(ranks_RST[:, own_part, own_t]), _group(ranks_RST[own_r, :, own_t])]
    dimensions.append(_group(ranks_RST[own_r, own_part]))
    sequence = _group(ranks_DST[own_d, :, own_t]) if sp > 1 else None
    both = _group(ranks_DST[own_d].flatten()) if sp > 1 and tp > 1 else None
    return RankMesh(
        everyone=group,
        data=group if tp == 1 else _group(ranks_DST[:, :, own_t].flatten()),
        sequence=sequence,
        peers=both or sequence or dimensions[-1],
        devices=DeviceMesh.from_group(
            dimensions,
            torch.device(device).type,
            mesh=ranks_RST,
            mesh_dim_names=("replicate", "shard", "tp"),
        ),
        tp=tp,
        counts_rows=own_s == 0 and own_t == 0,
    )


def _level(group: ProcessGroup, device: torch.device | str) -> None:
    """Brings the ranks to the same number of communicators.

    torch names one that is made by its members alone by this number, and they meet under its name. Ranks differ in it
    when some of them belong to other roles too.
    """
    own = torch.tensor([len(_world.pg_names)], device=device)
    most = own.clone()
    distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group)
    for _ in range(int(own), int(most)):
        _group([distributed.get_rank()])


def _group(ranks: Tensor | Sequence[int]) -> ProcessGroup:
    """A communicator of these ranks, made by them alone: others in the process's world need not know."""
    found = distributed.new_group([int(rank) for rank in ranks], use_local_synchronization=True)
    assert isinstance(found, ProcessGroup), "a rank makes only groups that it is in"
    return found
