"""Corrections of the difference between rollout and trainer log-probabilities: importance weights, masks, metrics.

Entry points are exported by `flowrl.algorithms`. Modules import `flowrl.algorithms` and `flowrl.data`.
"""
