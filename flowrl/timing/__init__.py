"""Estimates the time of a training step before it runs, from FLOPs, bytes and the rates of the GPUs.

Entry points: `estimate_step` (the phases of a step) and `render_time` (step_time.py). The formulas of single
phases and of the bytes of their collectives are pure functions in `phase_time` and `pass_bytes`.
`flowrl/devices/device_rates.py` has the rates and their sources. May import `flowrl.config`,
`flowrl.controller.placement`, `flowrl.data`, `flowrl.devices`, `flowrl.engines.train.model_flops`,
`flowrl.engines.train.muon`, `flowrl.engines.train.pipeline.stage_schedule` and `flowrl.memory`. Importing the package
loads torch.
"""
