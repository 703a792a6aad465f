"""Assignment of devices to the ranks of roles, and eviction of processes from shared devices.

Entry points: `plan.plan` (placement to `Plan`), `inventory.local_inventory` (devices of this machine),
`device_ownership.DeviceEviction` (evictions before a call), `plan_table.render_plan`.
`plan`, `inventory` and `plan_table` import only `flowrl.config`.
"""
