"""Implements `flowrl serve`: starts vLLM's server for a model, and requires a key for all paths except liveness checks.

Entry points: `serve` (model_server.py) and `read_api_key` (api_key.py). May import `flowrl.config`,
`flowrl.controller`, `flowrl.data`, `flowrl.devices`, `flowrl.inference.generation_settings`,
`flowrl.inference.model_source` and `flowrl.memory.model_fit`.
"""
