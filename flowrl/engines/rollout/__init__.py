"""Rollout engines: generate responses with log-probabilities, and load new weights.

base.py has the request, response and state types that all engines share; hf/ generates with transformers, vllm/ with
vLLM. sampling.py draws tokens; weight_check.py compares an engine's weights with the actor's.
Entry points: `HfRollout` (hf/engine.py) and `VllmRollout` (vllm/engine.py).
May import: config, data, engines.models.
"""
