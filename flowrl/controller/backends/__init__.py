"""Backends: start hosts and deliver calls to them.

Entry points: `base.Backend` (the protocol), `ray_backend.RayBackend` (one Ray actor per device),
`inline_backend.InlineBackend` (all hosts in the driver's process, for debugging and tests).
Only `ray_backend` and `ray_nodes` import ray.
"""
