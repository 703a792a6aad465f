"""Batches of references. The driver edits row indices, and workers read the values from the object store.

Entry points: `batch.Batch` (driver), `tensordicts.make_tensordict` (worker), `fields.FIELDS` (standard columns).
`payload` contains the stored arrays. `block` contains references to shards of rows. May import `flowrl.config`.
"""
