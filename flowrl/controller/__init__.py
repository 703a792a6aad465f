"""One driver program that controls worker processes.

Entry points: `Cluster` starts processes, `WorkerGroup` calls workers, `Worker` and `register` define workers, and
`Future` is the result of a call.
Packages: `placement` assigns devices to ranks, `calls` tracks calls and handles failures, `host` is the code of a
worker process, and `backends` starts worker processes. `wire` defines the messages between driver and hosts.
May import `flowrl.config`, `flowrl.data` and `flowrl.devices`.
"""
