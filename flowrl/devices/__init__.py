"""Calls of torch for a device, behind one interface for CPUs and GPUs.

Entry points: `device.get_device` (operations on a device), `device.release_unused_memory` (memory for other processes).
May import nothing else of flowrl.
"""
