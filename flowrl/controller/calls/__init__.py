"""Calls in flight and their wire format.

Entry points: `Calls` (calls.py) waits for calls and runs idle callbacks. `Request` (wire.py) is a call on the wire.
May import the top-level modules of `flowrl.controller`, its failures, host and placement packages, and `flowrl.data`.
"""
