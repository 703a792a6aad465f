"""Checks the metrics of each step while the run continues.

Entry points: `StepChecks` (step_checks: all checks of a step), `HealthLog` (health_log: findings of health checks).
May import `flowrl.checkpoints`, `flowrl.config`, `flowrl.controller`, `flowrl.health`, `flowrl.report`,
`flowrl.run.updates`, `flowrl.schedules` and `flowrl.weight_sync`.
"""
