"""Fork client: Ray runs this program instead of Python. It requests a worker process from the fork server and exits.

    python -IS fork_client.py SOCKET WORKER.py ARGUMENT...

If no server listens at the socket, the client executes WORKER.py itself. The client uses only the standard library.
"""

import array
import json
import os
import signal
import socket
import sys


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent exits, also after `exec`.

    Ray kills only registered processes. An unregistered process would try to connect to an ended Ray for a minute.
    """
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 (clients start faster without it)

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number, 0, 0, 0)


def main() -> None:
    # The raylet starts this program and sets RAY_RAYLET_PID. If the raylet has already ended, getppid() returns the id
    # of another process.
    parent_pid = int(os.environ.get("RAY_RAYLET_PID", os.getppid()))
    path, *argv = sys.argv[1:]
    request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.connect(path)
            # Pass stdout and stderr, which Ray redirects to the worker's log files.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))
            server.sendmsg([len(request).to_bytes(4, "big")], [rights])
            server.sendall(request)
            forked = bool(server.recv(1))
        except OSError:
            forked = False
    if not forked:
        die_with_parent(parent_pid)
        os.execv(sys.executable, [sys.executable, *argv])


if __name__ == "__main__":
    main()
