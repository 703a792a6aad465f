"""Parallelism of one role: data, FSDP2, tensor and sequence parallelism.

Entry points: `rank_mesh.rank_mesh` creates the process groups, `sharding.shard_model` shards a model over them, and
`gradients` reduces and clips gradients. May import `flowrl.engines.models`.
"""
