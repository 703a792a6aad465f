"""Rollout engines, which generate responses with log-probabilities and load new weights.

Entry points: the protocol `RolloutEngine` and `load_engine_class` (base.py). `HfRollout` (hf/engine.py) and
`VllmRollout` (vllm/engine.py) implement the protocol. `IpcSender` and `read_bucket` (cuda_ipc.py) share weights between
two processes on a GPU. `BroadcastSender` and `BroadcastReceiver` (broadcast.py) send weights to other devices.
`AdaptedWeights` (adapted_weights.py) merges an adapter into the weights of an engine. May import `flowrl.config`,
`flowrl.data`, `flowrl.devices` and `flowrl.engines.models`.
"""
