"""Placement: assigns ranks of roles to devices, and tracks which process owns the memory of a shared device.

Entry points: `plan.plan` (placement and inventory to a `Plan`), `inventory.local_inventory` (devices of this machine),
`device_ownership.DeviceEviction` (evictions before a call), `plan_table.render_plan`.
`plan`, `inventory` and `plan_table` import only `flowrl.config`.
"""
