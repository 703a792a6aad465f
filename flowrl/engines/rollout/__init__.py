"""Rollout engines, which generate responses with log-probabilities and load new weights.

Entry points: `HfRollout` (hf/engine.py) and `VllmRollout` (vllm/engine.py). base.py contains the types that both
engines share. May import `flowrl.config`, `flowrl.data` and `flowrl.engines.models`.
"""
