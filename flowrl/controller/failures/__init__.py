"""Detection of failures and recovery of lost processes.

Entry points: `Failures` (failures.py) finds the first cause and enforces deadlines; `Recovery` (recovery.py) holds
the replay logs; process_probe.py reads the stacks and the liveness of processes.
May import `flowrl.controller.errors`, its backends' protocol, wire format and placement, and `flowrl.data`.
"""
