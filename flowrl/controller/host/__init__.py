"""Code of a worker process, independent of the backend that started the process.

Entry points: `host.Host` (constructs and calls workers), `fork_server.ForkServer` (starts processes quickly),
`rendezvous` (creates process groups), `resident_worker.ResidentWorker` (offloads idle workers).
Imports the controller's protocol modules (`calls.wire`, `errors`, `worker`, `placement.plan`) and `flowrl.data`.
"""
