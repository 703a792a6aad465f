"""Records steps of a run on request, and runs a recorded step again in one process, where a debugger can stop it.

Entry points: `StepRecorder` (step_recorder.py), an observer of runs, and `replay_step` (step_replay.py), which
implements `flowrl replay`. docs/observability.md, section Replay, describes the use.
May import `flowrl.checkpoints`, `flowrl.config`, `flowrl.controller`, `flowrl.data`, `flowrl.devices`,
`flowrl.engines`, `flowrl.health`, `flowrl.memory`, `flowrl.report`, `flowrl.rewards`, `flowrl.run` and
`flowrl.schedules`.
"""
