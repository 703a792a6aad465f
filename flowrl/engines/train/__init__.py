"""Forward passes and optimizer steps.

Entry points: `engine.TrainEngine`, whose gradients do not depend on how rows are split over ranks and micro-batches,
and `layer_trace.trace_layers`, which measures the activations of a pass without data.
May import `flowrl.config`, `flowrl.data`, `flowrl.devices`, `flowrl.engines.models` and `flowrl.engines.parallel`.
"""
