"""All code that runs a model.

models       loading, saving, adapters, attention, sequence packing, 8-bit layers and weight export parallel     process
groups of a role, FSDP2, tensor parallelism and gradient reduction train        `TrainEngine`: forward passes over a
TensorDict and optimizer steps checkpoint   `EngineCheckpoints`: saves and loads a `TrainEngine` on any number of ranks
rollout      generation with transformers or vLLM

Each subpackage may import the subpackages listed above it. `rollout` imports only `models`.
"""
