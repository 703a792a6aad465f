"""Starts a Ray node on this host, and stops it when standard input ends. Standard input ends with the ssh connection.

The first line of standard input is JSON with environment variables for Ray. The token is therefore in no command line.
"""

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_END_TIMEOUT_S = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the node until standard input ends, and returns 0. If Ray ends first, returns 1 and keeps Ray's logs."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="folder of Ray's session")
    parser.add_argument("--ip", help="address of this host; default: Ray's choice")
    parser.add_argument("--join", metavar="HOST:PORT", help="address of the head node; default: start a head node")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    environment = os.environ | json.loads(sys.stdin.readline() or "{}")
    try:
        return _run_node(_command(arguments), environment, arguments.folder)
    except KeyboardInterrupt:
        return 0


def _command(arguments: argparse.Namespace) -> list[str]:
    words = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    if arguments.ip is not None:
        words.append(f"--node-ip-address={arguments.ip}")
    if arguments.join is not None:
        return [*words, f"--address={arguments.join}"]
    # Port 0: the kernel picks a free port, so that several clusters can share a host.
    return [*words, "--head", "--port=0", "--include-dashboard=false", f"--temp-dir={arguments.folder}"]


def _run_node(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> int:
    ray = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while ray.poll() is None:
            if select.select([sys.stdin], [], [], 0.2)[0]:
                return 0
        sys.stdout.write(f"Ray ended unexpectedly; its logs are in {folder}\n")
        return 1
    finally:
        is_unexpected = ray.poll() is not None
        _end(ray)
        if not is_unexpected:
            shutil.rmtree(folder, ignore_errors=True)


def _end(ray: "subprocess.Popen[bytes]") -> None:
    """Terminates `ray start`, which then stops its processes. When it has ended, or after a timeout, kills the process
    group.
    """
    ray.terminate()
    with suppress(subprocess.TimeoutExpired):
        ray.wait(_END_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(ray.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
