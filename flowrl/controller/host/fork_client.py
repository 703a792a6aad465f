"""What Ray runs in place of Python for a process of a run: asks the fork server for it, and ends.

    python -IS fork_client.py SOCKET WORKER.py ARGUMENT...

It must start in milliseconds, so it imports nothing but the standard library. Where nobody listens at the socket it
becomes the worker itself, as if there were no fork server.
"""

import array
import json
import os
import socket
import sys


def main() -> None:
    path, *argv = sys.argv[1:]
    order = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.connect(path)
            # Standard output and error go along: where Ray wants the worker's words.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))
            server.sendmsg([len(order).to_bytes(4, "big")], [rights])
            server.sendall(order)
            forked = bool(server.recv(1))
        except OSError:
            forked = False
    if not forked:
        os.execv(sys.executable, [sys.executable, *argv])


if __name__ == "__main__":
    main()
