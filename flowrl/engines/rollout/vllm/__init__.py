"""Generation with vLLM in dedicated processes. vLLM is optional, and only these modules import it.

Entry point: `engine.VllmRollout`. May import `flowrl.config`, `flowrl.data`, `flowrl.devices`,
`flowrl.engines.models` and `flowrl.engines.rollout`, but not `flowrl.engines.rollout.hf`.
"""
