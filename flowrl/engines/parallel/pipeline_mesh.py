"""The process groups of a role whose layers are divided among pipeline stages.

In the rank order, the stage varies slowest. The ranks of a stage have a `RankMesh` of their own, as if they were all
ranks of a smaller model. The ranks with the same index in each stage exchange hidden states and gradients.
"""

from dataclasses import dataclass

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from flowrl.engines.parallel.rank_mesh import RankMesh, align_group_counts, create_group, rank_mesh


@dataclass(frozen=True)
class PipelineMesh:
    """The process groups of one rank of a pipeline. The function `pipeline_mesh` creates them."""

    all_ranks: ProcessGroup
    """Ranks of all stages."""
    stage: int
    """Index of the stage of this rank."""
    num_stages: int
    stage_ranks: RankMesh
    """Ranks of this stage."""
    states: ProcessGroup
    """One rank of each stage, in the order of the stages. Hidden states are sent in this group."""
    gradients: ProcessGroup
    """A second group of the ranks of `states`, for gradients of hidden states and for collectives over all stages."""
    ends: ProcessGroup | None
    """The ranks of `states` in the first and the last stage. None for the ranks of other stages."""


def pipeline_mesh(
    group: ProcessGroup,
    *,
    device: torch.device | str,
    pp: int,
    tp: int = 1,
    sp: int = 1,
    shard_ranks: int | None = None,
) -> PipelineMesh:
    """Creates the process groups of a pipeline. All ranks of `group` must call this together.

    Args:
        group: ranks of the role.
        pp: number of stages, at least 2.
        device, tp, sp, shard_ranks: as in `rank_mesh`, for the ranks of a stage.
    Raises ValueError if pp does not divide the number of ranks, and the errors of `rank_mesh`.
    """
    num_ranks, rest = divmod(group.size(), pp)
    if rest:
        raise ValueError(f"{group.size()} ranks are not a multiple of pp {pp}")
    align_group_counts(group, device)
    ranks_PR = torch.tensor(distributed.get_process_group_ranks(group)).view(pp, num_ranks)
    stage, index = (int(x) for x in (ranks_PR == distributed.get_rank()).nonzero()[0])
    peers = ranks_PR[:, index].tolist()
    states, gradients = create_group(peers), create_group(peers)
    own = create_group(ranks_PR[stage].tolist())
    stage_ranks = rank_mesh(own, device=device, tp=tp, sp=sp, shard_ranks=shard_ranks)
    # Last, because only some ranks create it.
    ends = create_group([peers[0], peers[-1]]) if stage in (0, pp - 1) else None
    return PipelineMesh(group, stage, pp, stage_ranks, states, gradients, ends)
