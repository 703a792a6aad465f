"""Starts a Ray node on every host of a hostfile over ssh, runs a recipe, and stops the nodes."""

import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from flowrl.cli import exit_code
from flowrl.config import UserError
from flowrl.data.console import write_printable
from flowrl.data.folders.private_folder import private_folder, remove_folder

_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
_START_TIMEOUT_S, _END_TIMEOUT_S = 120.0, 30.0
_FORWARDED = ("GLOO_", "NCCL_", "HF_")
"""Prefixes of the environment variables that are forwarded to every node."""
_STARTED = "Ray runtime started"
"""Text that Ray prints when a node is running."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `HOSTFILE COMMAND...`. Returns the command's exit code, or 2 after a `UserError`."""
    words = list(sys.argv[1:] if argv is None else argv)
    codes: list[int] = []

    def program() -> None:
        if len(words) < 2:
            raise UserError("usage: run_multinode.sh HOSTFILE COMMAND... (--address HOST:PORT is appended)")
        with Hosts(read_hosts(Path(words[0]))) as hosts:
            codes.append(run([*words[1:], "--address", hosts.start()], hosts))

    return exit_code(program) or codes[0]


def read_hosts(path: Path) -> list[str]:
    """Returns the ssh hosts in a file with one host per line. `#` starts a comment. Raises UserError if the file is
    invalid.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the hostfile {path} ({error}): write one host per line") from None
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        host = line.partition("#")[0].strip()
        if not host:
            continue
        if not re.fullmatch(r"[\w.@:][\w.@:-]*", host):
            raise UserError(f"{path}:{number}: {host!r} is not a host name or address: write one per line")
        if host in hosts:
            raise UserError(f"{path}:{number}: duplicate host {host}: remove it")
        hosts.append(host)
    if not hosts:
        raise UserError(f"the hostfile {path} is empty: write one host per line, this machine first")
    return hosts


@dataclass(frozen=True)
class _Host:
    """A host and its ssh connection. The host's Ray node stops when the connection ends."""

    name: str
    connection: "subprocess.Popen[bytes]"
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def last_line(self) -> str:
        return ([line for line in self.output().splitlines() if line.strip()] or ["no output"])[-1].strip()


class Hosts:
    """Ray nodes on all hosts. They run from `start` until the end of the `with` block."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._hosts: list[_Host] = []
        self._ended: set[str] = set()
        # The private folder is deleted by the next run if this process is killed.
        self._logs = Path(tempfile.mkdtemp(prefix="hosts-", dir=private_folder()))
        self._folder = f"/tmp/flowrl-ray-{secrets.token_hex(4)}"
        # Each cluster has its own token, because the token allows running code on every host.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        forwarded = {name: os.environ[name] for name in os.environ if name.startswith(_FORWARDED)}
        # Workers get the driver's niceness, because other programs would starve them with Ray's default of 15. Task
        # events are off, because they let the memory of Ray's head process grow with every call.
        settings = {"RAY_worker_niceness": str(os.nice(0)), "RAY_task_events_report_interval_ms": "0"}
        self._node_environment = token | forwarded | settings
        self.environment = os.environ | token
        """Environment variables for programs that join the cluster."""

    def start(self) -> str:
        """Starts all nodes and returns the address of the cluster. Raises UserError if a node cannot start."""
        first = self._connect(self._names[0], ())
        self._await(first)
        match = re.search(r"--address='([^']+)'", first.output())
        assert match is not None, first.output()
        address = match[1]
        _check_is_local(address, self._names[0])
        others = [self._connect(name, ("--join", address)) for name in self._names[1:]]
        for host in others:
            self._await(host)
        self._await_nodes(address)
        _report(f"{len(self._names)} nodes at {address}: {', '.join(self._names)}")
        return address

    def _connect(self, name: str, arguments: Sequence[str]) -> _Host:
        log = self._logs / f"{len(self._hosts)}.log"
        # Ray uses an address from the hostfile, because a host may have several networks.
        address = name.rpartition("@")[2]
        ip_arguments = ["--ip", address] if re.fullmatch(r"[\d.]+", address) else []
        words = [sys.executable, "-m", "recipes.cluster.node", "--folder", self._folder, *ip_arguments, *arguments]
        command = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
        ssh = shlex.split(os.environ.get("FLOWRL_SSH", _SSH))
        with log.open("wb") as out:
            try:
                connection = subprocess.Popen(
                    # A new session, so that Ctrl-C reaches only the recipe, which still needs the nodes.
                    [*ssh, name, command],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"cannot run FLOWRL_SSH ({shlex.join(ssh)}): {error}") from None
        self._hosts.append(_Host(name, connection, log))
        assert connection.stdin is not None
        with suppress(BrokenPipeError):
            connection.stdin.write(f"{json.dumps(self._node_environment)}\n".encode())
            connection.stdin.flush()
        return self._hosts[-1]

    def _await(self, host: _Host) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while _STARTED not in host.output():
            code = host.connection.poll()
            if code == 255:
                raise UserError(f"cannot reach host {host.name}: {host.last_line()}")
            if code is not None:
                raise UserError(f"Ray did not start on host {host.name}: {host.last_line()}")
            if time.monotonic() > deadline:
                raise UserError(
                    f"Ray did not start on host {host.name} within {_START_TIMEOUT_S:.0f} s: {host.last_line()}"
                )
            time.sleep(0.1)

    def _await_nodes(self, address: str) -> None:
        # A new process, because Ray reads the token when it is imported.
        command = [sys.executable, "-m", "recipes.cluster.await_nodes", address, str(len(self._names))]
        waited = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if waited.returncode:
            raise UserError(waited.stderr.strip().rpartition("\n")[2].removeprefix("error: "))

    def report_ended(self) -> None:
        """Prints a line for every node that has ended since the previous call."""
        for host in self._hosts:
            if host.connection.poll() is not None and host.name not in self._ended:
                self._ended.add(host.name)
                _report(f"the node on host {host.name} has ended: {host.last_line()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            assert host.connection.stdin is not None
            with suppress(BrokenPipeError):
                host.connection.stdin.close()
        deadline = time.monotonic() + _END_TIMEOUT_S
        for host in self._hosts:
            try:
                host.connection.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _report(
                    f"host {host.name} did not respond within {_END_TIMEOUT_S:.0f} s: check it for remaining "
                    "ray processes"
                )
                host.connection.kill()
        remove_folder(self._logs)


def run(command: Sequence[str], hosts: Hosts) -> int:
    """Runs the command, forwards SIGINT and SIGTERM to it, and returns its exit code."""
    try:
        # A new session, so that Ctrl-C reaches the program only once, through `forward`.
        program = subprocess.Popen(command, env=hosts.environment, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise UserError(f"cannot run the command {command[0]}: {error}") from None

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = program.wait(1)
                return code if code >= 0 else 128 - code
            hosts.report_ended()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_is_local(address: str, name: str) -> None:
    """Raises UserError if the first host is not this machine. A driver needs a Ray node on its own machine."""
    ip = address.rpartition(":")[0]
    try:
        socket.create_server((ip, 0)).close()
    except OSError:
        raise UserError(
            f"the first host, {name}, is another machine ({ip}): run this command there, or list this machine first"
        ) from None


def _report(text: str) -> None:
    write_printable(f"flowrl: {text}\n", sys.stderr)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
