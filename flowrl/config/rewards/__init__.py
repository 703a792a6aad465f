"""Settings of rewards: functions, reward models, judges and services.

Entry points: `RewardConfig` and `RewardComponent` (reward_settings.py), `JudgeConfig` (judge_settings.py) and
`ServiceConfig` (service_settings.py).
May import `flowrl.config.base`, `flowrl.config.model`, `flowrl.config.roles`, `flowrl.config.engines` and
`flowrl.config.source`.
"""
