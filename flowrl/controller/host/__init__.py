"""Code of a worker process, independent of the backend that started the process.

Entry points: `host.Host` (constructs and calls workers), `fork_server.ForkServer` (starts processes quickly),
`rendezvous` (creates process groups), `process_probe` (reads stacks of processes).
May import `flowrl.config`, `flowrl.data`, `flowrl.devices`, `flowrl.controller.errors`,
`flowrl.controller.placement`, `flowrl.controller.wire` and `flowrl.controller.worker`.
"""
