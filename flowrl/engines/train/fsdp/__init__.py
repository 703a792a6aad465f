"""The included training engine: a transformers model in one process, replicated, or sharded with FSDP2.

Entry point: `engine.FsdpEngine`. May import `flowrl.algorithms`, `flowrl.config`, `flowrl.data`,
`flowrl.devices`, `flowrl.engines.models`, `flowrl.engines.parallel`, and the other modules of `flowrl.engines.train`.
"""
