"""Generation with transformers: continuous batching, decode loop and KV cache.

Entry point: `engine.HfRollout`. May import `flowrl.config`, `flowrl.engines.models` and `flowrl.engines.rollout`,
but not `flowrl.engines.rollout.vllm`.
"""
