"""Estimates the device memory of a plan before anything is loaded, and rejects plans that do not fit.

Entry points: `memory_estimate.estimate_memory` (bytes per device, role and call), `memory_table.check_memory` and
`render_memory`, `model_fit.check_model_fit` (model sizes against tp, sp and LoRA targets), and
`process_memory.resident_mb` (memory that a running program uses).
Imports: `flowrl.config` and `flowrl.controller.placement`; neither torch nor a model is loaded.
"""
