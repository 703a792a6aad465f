"""Training engines: outputs of a model, losses of these outputs, and optimizer steps.

Entry points: `base.TrainEngine`, the protocol; `fsdp.engine.FsdpEngine`, the included engine, and
`pipeline.engine.PipelineEngine`, its variant with pipeline stages; `module_engine` and `steps`, from which other
engines are built; `layer_trace.trace_layers`, which measures the activations of a pass without data. May import
`flowrl.algorithms`, `flowrl.config`, `flowrl.data`, `flowrl.devices`, `flowrl.engines.models` and
`flowrl.engines.parallel`.
"""
