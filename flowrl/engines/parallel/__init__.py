"""Data, FSDP2, tensor and sequence parallelism of one role, and the process groups of its pipeline stages.

Entry points: `rank_mesh.rank_mesh` and `pipeline_mesh.pipeline_mesh` create the process groups, `sharding.shard_model`
shards a model, and `gradients` sums and scales gradients. May import `flowrl.config`, `flowrl.devices` and
`flowrl.engines.models`.
"""
