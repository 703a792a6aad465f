"""Advantage estimators and reward shaping: scores, values and groups to per-token advantages.

Entry points are exported by `flowrl.algorithms`. Modules take tensors and numbers; they import only
`flowrl.algorithms`.
"""
