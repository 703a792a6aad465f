"""Rollout engines: generate responses with log-probabilities, and load new weights.

Entry points: `HfRollout` (hf/engine.py) and `VllmRollout` (vllm/engine.py); base.py has the types that both share.
May import: config, data, engines.models.
"""
