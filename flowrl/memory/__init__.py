"""Estimates the device memory of a plan before loading models, and rejects plans that exceed the available memory.

The plan and its memory also determine the values of null settings that depend on the devices, such as a KV cache size.

Entry points: `memory_estimate.estimate_memory` (bytes per device, role and call), `memory_table.check_memory` and
`render_memory`, `device_settings.resolve_settings`, `fit_memory` and `fit_engine` (an engine outside of a run), and
`model_fit.check_model_fit` (model sizes against tp, sp, pp and LoRA targets).
May import `flowrl.config`, `flowrl.controller.placement`, `flowrl.data` and
`flowrl.engines.train.pipeline.stage_schedule`, and `flowrl.engines.train.layer_trace` in a function only. Importing the
package loads neither torch nor transformers, so a typo in a config is reported at once.
"""
