"""flowrl: a single-controller dataflow framework for post-training language models with reinforcement learning.

The public classes can be imported from this package. Each is loaded on first use, so `import flowrl` is fast.
May import every package of flowrl, but only on first use.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.config import Placement
    from flowrl.controller.cluster import Cluster, ResourcePool
    from flowrl.controller.dispatch import Future, register_dispatch_mode
    from flowrl.controller.errors import ContractError, FlowError, WorkerError
    from flowrl.controller.group import WorkerGroup
    from flowrl.controller.worker import Dispatch, Worker, register
    from flowrl.data.batch.batch import Batch
    from flowrl.data.batch.tensordicts import make_tensordict

__version__ = "0.1.0"

# An OpenMP thread that waits for work spins for microseconds, and then sleeps. By default, libgomp lets it spin for
# milliseconds, which takes a core from other processes. Without any spin, a step of a small model takes twice as long,
# because each thread must be woken. OpenMP reads the environment when torch is loaded. Programs, workers on any node,
# and tests import this module before torch.
if os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "5000"}

# Loaded on first use: a config check or `flowrl plan` needs neither torch nor ray.
_HOMES = {
    "Batch": "flowrl.data.batch.batch",
    "Cluster": "flowrl.controller.cluster",
    "ContractError": "flowrl.controller.errors",
    "Dispatch": "flowrl.controller.worker",
    "FlowError": "flowrl.controller.errors",
    "Future": "flowrl.controller.dispatch",
    "Placement": "flowrl.config",
    "ResourcePool": "flowrl.controller.cluster",
    "Worker": "flowrl.controller.worker",
    "WorkerError": "flowrl.controller.errors",
    "WorkerGroup": "flowrl.controller.group",
    "make_tensordict": "flowrl.data.batch.tensordicts",
    "register": "flowrl.controller.worker",
    "register_dispatch_mode": "flowrl.controller.dispatch",
}

__all__ = [
    "Batch",
    "Cluster",
    "ContractError",
    "Dispatch",
    "FlowError",
    "Future",
    "Placement",
    "ResourcePool",
    "Worker",
    "WorkerError",
    "WorkerGroup",
    "make_tensordict",
    "register",
    "register_dispatch_mode",
]


def __getattr__(name: str) -> Any:  # Any: classes and functions
    if name not in _HOMES:
        raise AttributeError(f"module 'flowrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
