"""Implements `flowrl eval`: evaluates models on tasks, compares them, and writes tables and JSON.

Entry point: `evaluate_models` (evaluate_models.py). May import `flowrl.algorithms`, `flowrl.checkpoints`,
`flowrl.config`, `flowrl.controller`, `flowrl.data`, `flowrl.engines`, `flowrl.inference.generation_settings`,
`flowrl.inference.model_source`, `flowrl.memory`, `flowrl.run` and `flowrl.workers`.
"""
