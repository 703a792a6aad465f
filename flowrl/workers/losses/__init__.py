"""Losses of the trained roles, and their inputs.

Entry points: `Loss` (loss.py) and the losses of the settings (configured_losses.py, preference_losses.py). May import
`flowrl.algorithms`, `flowrl.config`, `flowrl.data` and `flowrl.engines`.
"""
