"""Batches by reference: the driver edits row indices, and workers read the values from the object store.

Entry points: `batch.Batch` (driver), `tensordicts.make_tensordict` (worker), `fields.FIELDS` (standard columns).
Layers, from the values up: `payload` (arrays), `block` (shards and row plans), `batch`, `tensordicts`.
Imports only `flowrl.config`.
"""
