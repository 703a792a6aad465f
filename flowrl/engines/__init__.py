"""All code that runs a model.

- models: loading, saving, adapters, attention, sequence packing, 8-bit layers and weight export
- parallel: process groups of a role, FSDP2, tensor parallelism and gradient reduction
- train: the protocol `TrainEngine`, and `FsdpEngine`, which computes outputs of a model and takes optimizer steps
- checkpoint: `EngineCheckpoints`, which saves and loads a `TrainEngine` on any number of ranks
- rollout: generation with transformers or vLLM

A subpackage uses only subpackages above it in this list. `rollout` uses only `models`.
May import `flowrl.algorithms`, `flowrl.config`, `flowrl.data` and `flowrl.devices`.
"""
