"""Reward functions that recipes name as `module:function` in `reward.function`.

A function receives the columns of a row as keyword arguments and returns a float. Modules import only the standard
library.
"""
