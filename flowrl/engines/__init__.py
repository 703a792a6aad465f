"""Engines: all code that runs a model.

models       loading, saving, adapters, attention, sequence packing, 8-bit layers and weight export
parallel     the process groups of a role, FSDP2 and tensor parallelism, gradient reduction
train        `TrainEngine`: forward passes over a TensorDict and optimizer steps
checkpoint   `EngineCheckpoints`: saves and loads an engine on any number of ranks
rollout      generation with transformers or vLLM

Each layer imports only the ones above it; `rollout` imports `models` alone. Other packages import the modules directly.
"""
