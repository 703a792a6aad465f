"""Generation with transformers: continuous batching (engine.py), the decode loop (decoder.py) and the KV cache."""
