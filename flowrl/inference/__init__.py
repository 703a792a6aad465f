"""Uses trained models: finds the model of a run, a checkpoint or an adapter.

Entry point: `resolve_model` (model_source.py). May import `flowrl.checkpoints`, `flowrl.config`, `flowrl.data`,
`flowrl.engines` and `flowrl.run`.
"""
