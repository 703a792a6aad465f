"""Which ranks of a role hold a model together: from its placement to the engine."""

from flowrl.config import EngineConfig, shards_model
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Worker
from flowrl.engines.parallel.rank_mesh import RankMesh, rank_mesh


def mesh_of(worker: Worker, engine: EngineConfig) -> RankMesh:
    """The ranks of a worker's role, laid out as its placement and its engine say. All of them call it together."""
    return rank_mesh(
        worker.context.process_group,
        device=worker.device,
        tp=worker.mesh.tp,
        sp=worker.mesh.sp,
        shard_ranks=engine.shard_ranks,
    )


def shares_model(mesh: Mesh, engine: EngineConfig) -> bool:
    """Whether the ranks of a role need each other for a forward pass."""
    return mesh.sp > 1 or shards_model(engine, mesh.size, mesh.tp)
