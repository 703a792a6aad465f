"""Schedules: when responses are generated relative to training (`sync`, `one_step_off`, `async`).

Entry points: `make_rollout_source` (streaming_rollouts), which gives a run the batch of each step; `check_schedule` and
`render_graph` (schedule_plan) for preflight checks and `flowrl plan`; `simulate` (simulation) for throughput estimates.
May import weight_sync, report, checkpoints, controller, data and config.
"""
