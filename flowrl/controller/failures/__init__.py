"""Detection of failures and recovery of lost processes.

Entry points: `Failures` (failures.py) finds root causes and enforces deadlines. `Recovery` (recovery.py) stores the
replay logs. process_probe.py reads the stacks of processes and checks whether they are alive.
May import `flowrl.controller.errors`, its backends' protocol, wire format and placement, and `flowrl.data`.
"""
