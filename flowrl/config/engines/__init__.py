"""Capabilities and settings of rollout and training engines, readable without importing an engine.

Entry points: `EngineCapabilities`, `EngineName`, `get_capabilities` and `TransferConfig` (rollout_engines.py),
`TrainCapabilities`, `TrainEngineName` and `get_train_capabilities` (train_engines.py), and `VllmConfig`
(vllm_settings.py).
May import `flowrl.config.base`.
"""
