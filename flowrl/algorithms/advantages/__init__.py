"""Advantage estimators and reward shaping. Estimators turn scores, values and groups into per-token advantages.

`flowrl.algorithms` exports the entry points. Modules take tensors and numbers.
May import `flowrl.algorithms`.
"""
