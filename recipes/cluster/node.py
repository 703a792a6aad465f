"""One host of a cluster: starts a Ray node, and ends it when the input ends, which is when whoever started it is gone.

The first line of the input is what is added to Ray's environment, as JSON: so its token stands on no command line. The
output is Ray's own.
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

_END_LIMIT_S = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when the input ended, and 1 when Ray ended before it, whose logs then stay."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="where Ray's session is, on every host")
    parser.add_argument("--ip", help="the address of this host that Ray is to use; Ray's choice if not stated")
    parser.add_argument("--join", metavar="HOST:PORT", help="the first node's address; without it this is the first")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    environment = os.environ | json.loads(sys.stdin.readline() or "{}")
    try:
        return _hold(_command(arguments), environment, arguments.folder)
    except KeyboardInterrupt:
        return 0


def _command(arguments: argparse.Namespace) -> list[str]:
    words = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    if arguments.ip is not None:
        words.append(f"--node-ip-address={arguments.ip}")
    if arguments.join is not None:
        return [*words, f"--address={arguments.join}"]
    # Port 0 is one that the kernel picks, so that clusters of several people never meet.
    return [*words, "--head", "--port=0", "--include-dashboard=false", f"--temp-dir={arguments.folder}"]


def _hold(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> int:
    ray = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while ray.poll() is None:
            if select.select([sys.stdin], [], [], 0.2)[0]:
                return 0
        sys.stdout.write(f"Ray ended by itself; its logs are in {folder}\n")
        return 1
    finally:
        alone = ray.poll() is not None
        _end(ray)
        if not alone:
            shutil.rmtree(folder, ignore_errors=True)


def _end(ray: "subprocess.Popen[bytes]") -> None:
    """Ends what `ray start` started: asked to end it ends all its processes, which are one process group."""
    ray.terminate()
    with suppress(subprocess.TimeoutExpired):
        ray.wait(_END_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(ray.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
