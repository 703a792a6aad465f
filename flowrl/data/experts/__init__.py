"""Sizes of mixtures of experts, and metrics of the load of their experts.

Entry points: `mixture.read_mixture` reads the sizes in a model's configuration, and `expert_load.ExpertLoad` is a
metric. May import nothing else of flowrl.
"""
