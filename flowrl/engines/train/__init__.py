"""Forward passes and optimizer steps.

Entry point: `engine.TrainEngine`. Its gradients do not depend on how rows are split over ranks and micro-batches.
May import `flowrl.config`, `flowrl.data`, `flowrl.devices`, `flowrl.engines.models` and
`flowrl.engines.parallel`.
"""
