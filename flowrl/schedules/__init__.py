"""Schedules: when responses are generated relative to training (`sync`, `one_step_off`, `async`).

Entry points: `make_rollout_source` (replica_stream) creates the source of each step's batch. `check_schedule` and
`render_graph` (schedule_plan) serve preflight checks and `flowrl plan`. `simulate` (simulation) estimates throughput.
`Rewards` and `EnvironmentScoring` (rewards) score responses, and `GroupFilter` (group_filter) selects the groups that
are trained. `PinnedEvaluation` (replica_stream) evaluates alongside training. May import `flowrl.checkpoints`,
`flowrl.config`, `flowrl.controller`, `flowrl.data`, `flowrl.rewards`, `flowrl.user_code.channel`, `flowrl.weight_sync`
and `flowrl.workers`.
"""
