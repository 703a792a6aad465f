"""Losses for preference data: pairwise losses (DPO and variants) and KTO.

Entry points are exported by `flowrl.algorithms`. Modules import only `flowrl.algorithms`.
"""
