"""Records the steps of a run, and passes the events of the run to the observers.

Entry points: `RunObservers` (observers: the list of observers, and the events that they receive), `StepLog` (step_log:
calls and metrics of a step), `HealthLog` (health_log: findings of health checks), `FailureWatch` (failure_watch: failed
rewards).
May import `flowrl.checkpoints.run_folder`, `flowrl.config`, `flowrl.controller`, `flowrl.data`, `flowrl.health`,
`flowrl.report`, `flowrl.run`, `flowrl.schedules` and `flowrl.weight_sync`.
"""
