"""Settings of rewards: functions, reward models, judges and services.

Entry points: `RewardConfig`, `RewardComponent` and `ServiceConfig` (reward_settings.py), and `JudgeConfig`
(judge_settings.py).
May import `flowrl.config.base`, `flowrl.config.model`, `flowrl.config.roles`, `flowrl.config.engines` and
`flowrl.config.source`.
"""
