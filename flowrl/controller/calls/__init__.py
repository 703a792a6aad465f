"""Submission and tracking of calls.

Entry points: `Calls` (calls.py) tracks calls in flight, waits for them and runs idle callbacks; `lower_arguments` and
`Request` (wire.py) define the wire format of a call.
May import the top-level modules of `flowrl.controller`, its failures, host and placement packages, and `flowrl.data`.
"""
