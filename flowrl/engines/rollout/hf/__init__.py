"""Generation with transformers: continuous batching, decode loop and KV cache.

Entry point: `engine.HfRollout`. May import the other modules of `flowrl.engines.rollout` except `vllm`, and
`flowrl.engines.models` and `flowrl.config`.
"""
