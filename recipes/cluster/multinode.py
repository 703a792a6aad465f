"""Starts a Ray node on every host of a hostfile over ssh, runs a recipe on them, and ends what it started."""

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

_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
_START_LIMIT_S, _END_LIMIT_S = 120.0, 30.0
_PASSED = ("GLOO_", "NCCL_", "HF_")
"""Beginnings of the environment variables that every node is given as they are here."""
_STARTED = "Ray runtime started"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line `HOSTFILE COMMAND...`. Returns the command's exit code, or 2 after a sentence."""
    words = list(sys.argv[1:] if argv is None else argv)
    codes: list[int] = []

    def program() -> None:
        if len(words) < 2:
            raise UserError("usage: run_multinode.sh HOSTFILE COMMAND..., where --address HOST:PORT is put at the end")
        with Hosts(read_hosts(Path(words[0]))) as hosts:
            codes.append(run([*words[1:], "--address", hosts.start()], hosts))

    return exit_code(program) or codes[0]


def read_hosts(path: Path) -> list[str]:
    """The hosts of a hostfile: one in a line, for ssh; what follows a # is a remark. Raises `UserError`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the hostfile {path} cannot be read ({error}): write one host per line into it") from None
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        host = line.partition("#")[0].strip()
        if not host:
            continue
        if not re.fullmatch(r"[\w.@:][\w.@:-]*", host):
            raise UserError(f"{path}:{number}: {host!r} is not a host: write one name or address per line")
        if host in hosts:
            raise UserError(f"{path}:{number}: {host} stands there twice: remove one")
        hosts.append(host)
    if not hosts:
        raise UserError(f"the hostfile {path} names no host: write one per line, this machine first")
    return hosts


@dataclass(frozen=True)
class _Host:
    """One host and its connection, which holds its Ray node."""

    name: str
    connection: "subprocess.Popen[bytes]"
    log: Path

    def says(self) -> str:
        return self.log.read_text(errors="replace")

    def last_line(self) -> str:
        return ([line for line in self.says().splitlines() if line.strip()] or ["it said nothing"])[-1].strip()


class Hosts:
    """A Ray node on every host, from `start` until the end of the `with` block."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._hosts: list[_Host] = []
        self._ended: set[str] = set()
        self._logs = tempfile.TemporaryDirectory(prefix="flowrl-hosts-")
        self._folder = f"/tmp/flowrl-ray-{secrets.token_hex(4)}"
        # This cluster's own: whoever holds it may run code on every host.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        passed = {name: os.environ[name] for name in os.environ if name.startswith(_PASSED)}
        # Of workers: the driver's own. Ray's default is 15, at which anything else that the machine runs starves them.
        self._node_environment = token | passed | {"RAY_worker_niceness": str(os.nice(0))}
        self.environment = os.environ | token
        """Of programs that join the cluster."""

    def start(self) -> str:
        """Returns the cluster's address once Ray runs on every host. Raises `UserError`."""
        first = self._connect(self._names[0], ())
        self._await(first)
        found = re.search(r"--address='([^']+)'", first.says())
        assert found is not None, first.says()
        address = found[1]
        _check_here(address, self._names[0])
        others = [self._connect(name, ("--join", address)) for name in self._names[1:]]
        for host in others:
            self._await(host)
        self._await_nodes(address)
        _say(f"{len(self._names)} nodes at {address}: {', '.join(self._names)}")
        return address

    def _connect(self, name: str, arguments: Sequence[str]) -> _Host:
        log = Path(self._logs.name) / f"{len(self._hosts)}.log"
        # An address in the hostfile is also the one that Ray is to use there: hosts may have several networks.
        address = name.rpartition("@")[2]
        own = ["--ip", address] if re.fullmatch(r"[\d.]+", address) else []
        words = [sys.executable, "-m", "recipes.cluster.node", "--folder", self._folder, *own, *arguments]
        command = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
        ssh = shlex.split(os.environ.get("FLOWRL_SSH", _SSH))
        with log.open("wb") as out:
            try:
                connection = subprocess.Popen(
                    # A session of its own: Ctrl-C is for the recipe, which still needs its nodes then.
                    [*ssh, name, command],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"FLOWRL_SSH is {shlex.join(ssh)}, which cannot be run: {error}") from None
        self._hosts.append(_Host(name, connection, log))
        assert connection.stdin is not None
        with suppress(BrokenPipeError):
            connection.stdin.write(f"{json.dumps(self._node_environment)}\n".encode())
            connection.stdin.flush()
        return self._hosts[-1]

    def _await(self, host: _Host) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while _STARTED not in host.says():
            code = host.connection.poll()
            if code == 255:
                raise UserError(f"host {host.name} cannot be reached: {host.last_line()}")
            if code is not None:
                raise UserError(f"Ray did not start on host {host.name}: {host.last_line()}")
            if time.monotonic() > deadline:
                raise UserError(f"Ray did not start on host {host.name} in {_START_LIMIT_S:.0f} s: {host.last_line()}")
            time.sleep(0.1)

    def _await_nodes(self, address: str) -> None:
        # Ray reads its token when it is imported, so whoever is to have another one is another process.
        command = [sys.executable, "-m", "recipes.cluster.await_nodes", address, str(len(self._names))]
        waited = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if waited.returncode:
            raise UserError(waited.stderr.strip().rpartition("\n")[2].removeprefix("error: "))

    def tell_ended(self) -> None:
        """Says once of every host that its node has ended, if it has."""
        for host in self._hosts:
            if host.connection.poll() is not None and host.name not in self._ended:
                self._ended.add(host.name)
                _say(f"the node on host {host.name} has ended: {host.last_line()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            assert host.connection.stdin is not None
            with suppress(BrokenPipeError):
                host.connection.stdin.close()
        deadline = time.monotonic() + _END_LIMIT_S
        for host in self._hosts:
            try:
                host.connection.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _say(f"host {host.name} did not answer in {_END_LIMIT_S:.0f} s: look for ray processes of yours there")
                host.connection.kill()
        self._logs.cleanup()


def run(command: Sequence[str], hosts: Hosts) -> int:
    """Runs the command to its end, passes on the signals that end programs, and returns its exit code."""
    try:
        # A session of its own, so that Ctrl-C in a terminal reaches it once, by us.
        program = subprocess.Popen(command, env=hosts.environment, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise UserError(f"the command {command[0]} cannot be run: {error}") from None

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = program.wait(1)
                return code if code >= 0 else 128 - code
            hosts.tell_ended()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_here(address: str, name: str) -> None:
    """A driver needs a Ray node on its own machine: refuses a first host that is another one."""
    ip = address.rpartition(":")[0]
    try:
        socket.create_server((ip, 0)).close()
    except OSError:
        raise UserError(f"the first host, {name}, is another machine ({ip}): run this there") from None


def _say(text: str) -> None:
    sys.stderr.write(f"flowrl: {text}\n")


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
