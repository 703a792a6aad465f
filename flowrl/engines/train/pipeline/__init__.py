"""Pipeline parallelism of the included training engine: each stage has a part of the layers of a model.

Entry points: `engine.PipelineEngine`, and `stage_schedule` for the layers of each stage and the order of its passes.
May import `flowrl.config`, `flowrl.data`, `flowrl.devices`, `flowrl.engines.models`, `flowrl.engines.parallel` and
`flowrl.engines.train`.
"""
