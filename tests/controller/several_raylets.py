"""A Ray cluster of several nodes on this machine, as a program: each node has an address of the loopback network.

Prints the cluster's address, then executes one command per line and prints a line: `add CPUS ADDRESS`; `pinned CPUS
ADDRESS` adds a node whose processes may use one CPU; `kill` ends the node that was added last; `freeze` stops it
without closing its connections, like a machine that loses power. It ends its nodes when its input ends.
"""

import os
import signal
import sys

from ray._private.node import Node
from ray.cluster_utils import Cluster

NODES = ((2, "127.0.0.2"), (4, "127.0.0.3"), (4, "127.0.0.3"))
"""CPU slots and address; the last two are on one machine, as far as addresses tell."""
GPUS = 4
"""Of each of them, in Ray's books alone: what runs there must not touch them."""


def main() -> None:
    cluster = Cluster()
    added = [add(cluster, cpus, address) for cpus, address in NODES]
    write_line(cluster.address)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "add":
            added.append(add(cluster, int(words[1]), words[2]))
        elif words[0] == "pinned":
            cpus = os.sched_getaffinity(0)
            os.sched_setaffinity(0, [min(cpus)])  # the processes of the node inherit it
            added.append(add(cluster, int(words[1]), words[2]))
            os.sched_setaffinity(0, cpus)
        elif words[0] == "freeze":
            os.kill(added[-1].all_processes["raylet"][0].process.pid, signal.SIGSTOP)
        else:
            cluster.remove_node(added.pop(), allow_graceful=False)
        write_line("done")
    cluster.shutdown()


def add(cluster: Cluster, cpus: int, address: str) -> Node:
    return cluster.add_node(
        num_cpus=cpus,
        num_gpus=GPUS,
        node_ip_address=address,
        include_dashboard=False,
        include_log_monitor=False,
        object_store_memory=80 * 1024**2,
    )


def write_line(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
