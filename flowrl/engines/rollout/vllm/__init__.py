"""Generation with vLLM in dedicated processes. vLLM is optional, and only these modules import it.

Entry point: `engine.VllmRollout`. May import the other modules of `flowrl.engines.rollout` except `hf`, and
`flowrl.engines.models`, `flowrl.data` and `flowrl.config`.
"""
