"""Assignment of devices to the ranks of roles.

Entry points: `plan.plan` (placement to `Plan`), `inventory.local_inventory` (devices of this machine),
`plan_table.render_plan`, `weight_transport.choose_transports` (from the actor to each rollout),
`cpu_threads.count_usable_cpus` (CPUs that this process may use). May import `flowrl.config`.
"""
