"""Losses for preference data: pairwise losses (DPO and variants) and KTO.

Entry points are exported by `flowrl.algorithms`. May import `flowrl.algorithms`.
"""
