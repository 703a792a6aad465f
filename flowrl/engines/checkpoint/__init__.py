"""Checkpoints of a `TrainEngine`, and export of models from a checkpoint.

Entry points: `engine_checkpoint.EngineCheckpoints` and `load`; `export.export_model` and `export_adapter`.
May import `flowrl.config`, `flowrl.data`, `flowrl.devices`, `flowrl.engines.models` and
`flowrl.engines.train`.
"""
