"""One driver program that controls worker processes.

Entry points: `Cluster` (cluster.py) starts processes, `WorkerGroup` (group.py) calls their workers, `Worker` and
`register` (worker.py) define workers, `Future` (dispatch.py) is a result, and errors.py has the exceptions.
Sub-packages: placement assigns devices to ranks, calls submits and tracks calls, failures detects and recovers lost
processes, host is the code of a worker process, and backends run hosts on Ray or inline.
May import `flowrl.config` and `flowrl.data`.
"""
