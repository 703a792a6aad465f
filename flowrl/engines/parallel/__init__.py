"""Data, FSDP2, tensor and sequence parallelism of one role.

Entry points: `rank_mesh.rank_mesh` creates the process groups, `sharding.shard_model` shards a model, and `gradients`
reduces and clips gradients. May import `flowrl.config`, `flowrl.devices` and `flowrl.engines.models`.
"""
