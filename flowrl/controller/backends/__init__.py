"""Backends start the processes of workers and send calls to them.

Entry points: `base.Backend` (the protocol), `ray_backend.RayBackend` (one Ray actor per device), and
`inline_backend.InlineBackend` (all workers in the driver's process). Only `ray_backend`, `ray_nodes` and `local_ray`
import ray.
May import `flowrl.config`, `flowrl.data`, `flowrl.controller.errors`, `flowrl.controller.host`,
`flowrl.controller.placement` and `flowrl.controller.wire`.
"""
