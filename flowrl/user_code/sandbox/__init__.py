"""Runs Python code of a response in a process without access to the network, the user's files and other processes.

Entry points: `Sandbox` and `SandboxLimits` (launch.py). `runner.py` and `proxied_calls.py` run in the new process
and import only the standard library and `isolation.py`. May import `flowrl.data.folders`.
"""
