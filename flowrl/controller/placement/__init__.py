"""Assignment of devices to the ranks of roles.

Entry points: `plan.plan` (placement to `Plan`), `inventory.local_inventory` (devices of this machine),
`plan_table.render_plan`, `cpu_threads.count_usable_cpus` (CPUs that this process may use). May import `flowrl.config`.
"""
