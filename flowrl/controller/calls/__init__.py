"""Calls in flight, their failures, and the recovery of lost processes.

Entry points: `Calls` (calls.py) waits for calls and runs idle callbacks. `Failures` (failures.py) finds root causes and
enforces deadlines. `Recovery` (failures.py) stores the replay logs.
May import `flowrl.controller` and `flowrl.data`, except `flowrl.controller.cluster` and `flowrl.controller.group`.
"""
