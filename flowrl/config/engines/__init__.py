"""Capabilities and settings of rollout and training engines, readable without importing an engine.

Entry points: `EngineCapabilities` (rollout_capabilities.py), `EngineName` and `get_capabilities` (rollout_engines.py),
`TrainCapabilities`, `TrainEngineName` and `get_train_capabilities` (train_engines.py), `VllmConfig` (vllm_settings.py),
`TransferConfig` (transfer_settings.py).
May import `flowrl.config.base`.
"""
