"""Reward functions for the setting `reward.function`, such as `flowrl.rewards.final_number:score`.

A reward function receives the columns of a row as keyword arguments and returns a float. `load_reward_function`
(reward_function.py) imports a function, and `ScoringPool` (pool.py) calls functions in separate processes
with a timeout.

May import `flowrl.config`, `flowrl.data` and `flowrl.user_code`.
"""
