"""Runs code of users in processes, and connects workers that request it. Knows neither rewards nor environments.

`Supervisor` (supervisor.py) starts, watches and ends processes (process.py). Its launcher (launcher.py) forks them; a
guard (guard.py) restricts each process with isolation.py and ends its descendants. `RequestServer` and `RequestClient`
(channel.py) carry requests between workers. `Sandbox` (sandbox) runs code of responses. Messages have the format of
`multiprocessing.connection`; those of user code contain JSON only.

May import `flowrl.config` and `flowrl.data.folders`.
"""
