"""Batches by reference: the driver edits row indices, and workers read values from the object store.

Entry points: `batch.Batch` (driver), `tensordicts.make_tensordict` (worker), `fields.FIELDS` (standard columns).
`payload` contains the stored arrays, and `block` the references to shards of rows.
Imports only `flowrl.config`.
"""
