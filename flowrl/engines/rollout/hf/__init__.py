"""Generation with transformers: continuous batching, decode loop and KV cache."""
