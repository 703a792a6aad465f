"""One process of reward functions, as the pool sees it: its sockets, its output, the calls in flight, and its end."""

import array
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from flowrl.data.folders.private_folder import create_folder, list_private_roots, remove_tree
from flowrl.rewards import reward_function
from flowrl.rewards.processes.frames import FrameReader
from flowrl.rewards.processes.launcher import KILL, WRITE_STACKS
from flowrl.rewards.processes.scorer import CALL_START

_MAX_RESULT_BYTES = 1 << 23
_OUTPUT_PER_CALL = 1 << 20
"""Bytes that a process may print during a call. Then its writes block."""

_OUTPUT_KEPT = 2000
"""Bytes of the last output that an error message contains."""

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')

_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TZ|TMPDIR|LANG|LANGUAGE|LC_\w+|PYTHON(PATH|HOME|UTF8|HASHSEED|WARNINGS)|VIRTUAL_ENV|"
    r"CONDA_PREFIX|LD_LIBRARY_PATH|XDG_\w+|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|TOKENIZERS_PARALLELISM|NLTK_DATA|"
    r"HF_(HOME|HUB_CACHE|DATASETS_CACHE|HUB_OFFLINE|DATASETS_OFFLINE)|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
"""Variables of the environment that a reward function receives. Others, such as tokens and passwords, are removed."""

_PROXIES = re.compile(r"(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)


def environment_of(variables: Mapping[str, str], *, allow_network: bool, also: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the variables that a process of reward functions receives. `also` are names of further variables."""
    passed = {
        name: value
        for name, value in variables.items()
        if _VARIABLES.fullmatch(name) or name in also or (allow_network and _PROXIES.fullmatch(name))
    }
    # Each process is one worker of many, so a library must not start a thread per core.
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **passed}


class Launcher:
    """Starts the launcher (launcher.py) in a subprocess. It ends with the thread that has created it."""

    def __init__(self, environment: Mapping[str, str], main_loop: str = "flowrl.rewards.processes.scorer") -> None:
        """`environment` are the variables of the processes. `main_loop` is the module of their function `serve`."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = create_folder("functions")
        self.folder = self._folder.path
        roots = [str(root) for root in list_private_roots()]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "import socket\n"
            "from flowrl.rewards.processes import launcher\n"
            f"from {main_loop} import serve\n"
            f"control = socket.socket(fileno={theirs.fileno()})\n"
            f"launcher.main(control, {os.getpid()}, {str(self.folder)!r}, {roots!r}, serve)"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def make_folder(self) -> str:
        """Creates the temporary folder of a process. Raises ConnectionError if the launcher has ended, because its
        folder is then removed.
        """
        try:
            return tempfile.mkdtemp(dir=self.folder)
        except FileNotFoundError as error:
            if self._process.poll() is None:  # a program that cleans /tmp has removed the folder
                self.folder.mkdir(mode=0o700, exist_ok=True)
                return tempfile.mkdtemp(dir=self.folder)
            raise ConnectionError(f"the launcher has ended: its folder {self.folder} has been removed") from error

    def start(self, settings: Mapping[str, Any], descriptors: list[int]) -> None:
        """Requests a new process. Raises OSError if the launcher has ended."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.socket.sendmsg([json.dumps(settings).encode()], ancillary)

    def close(self) -> None:
        """Ends the launcher after all its processes have ended. Close the guards first."""
        self.socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.remove()


class ScoringProcess:
    """The sockets and pipes of one process. The pool's thread reads them when they are readable."""

    def __init__(self, number: int, launcher: Launcher, settings: Mapping[str, Any]) -> None:
        self.number = number
        self.channel, channel = socket.socketpair()
        self.guard, guard = socket.socketpair()
        self.output, output = os.pipe()
        self.stacks, stacks = os.pipe()
        rows, self._rows = os.pipe()
        """Has a byte per sent row that may begin. The process takes one before all rows of a message but the first."""
        # The process can change the flags of its own end, and could make reads of the pool block.
        self._reclaimed_rows = os.open(f"/proc/self/fd/{rows}", os.O_RDONLY)
        self.has_ended = False
        self._folder = None
        try:
            # `close` removes this folder, because a killed process cannot remove its temporary files.
            self._folder = launcher.make_folder()
            for descriptor in (stacks, rows):  # a signal handler writes the stacks
                os.set_blocking(descriptor, False)
            launcher.start(
                {**settings, "folder": self._folder}, [channel.fileno(), output, guard.fileno(), stacks, rows]
            )
        except OSError:
            self.close()
            raise
        finally:
            for end in (channel, guard):
                end.close()
            for descriptor in (output, stacks, rows):
                os.close(descriptor)
        for end in (self.channel, self.guard):
            end.setblocking(False)
        for descriptor in (self.output, self.stacks, self._rows, self._reclaimed_rows):
            os.set_blocking(descriptor, False)
        self._reader = FrameReader(_MAX_RESULT_BYTES)
        self._unsent = bytearray()
        self._output = bytearray()
        self._stacks = bytearray()
        self._status = bytearray()
        self._allowance = _OUTPUT_PER_CALL

    def send(self, frame: bytes) -> None:
        """Sends a call. Bytes that the process does not read yet are kept for `write`."""
        self._unsent += frame
        self.write()

    def write(self) -> None:
        """Sends as many kept bytes as possible."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # its end is reported by the guard
            while self._unsent:
                sent = self.channel.send(memoryview(self._unsent)[: 1 << 18])
                del self._unsent[:sent]

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def start_call(self, num_further_rows: int = 0) -> None:
        """Resets the limit of the output of a call, and discards earlier output.

        The process may also begin `num_further_rows` rows of the same message. Raises ValueError if the process has
        made that impossible.
        """
        self.allow_output()
        self._output.clear()
        if num_further_rows:
            try:
                os.write(self._rows, bytes(num_further_rows))
            except BlockingIOError:
                raise ValueError("rows that were not sent") from None

    def allow_output(self) -> None:
        """Resets the limit of the output of a call."""
        self._allowance = _OUTPUT_PER_CALL

    def reclaim_rows(self, num_sent: int) -> int:
        """Reclaims the sent rows that the process has not begun, and returns their number.

        Raises ValueError if there are more than `num_sent`, because the process has added some.
        """
        num_rows = len(_read(self._reclaimed_rows, num_sent + 1) or b"")
        if num_rows > num_sent:
            raise ValueError("rows that were not sent")
        return num_rows

    def read_messages(self) -> Iterator[dict[str, Any]]:  # Any: values of JSON
        """Yields the messages that have arrived. Raises FrameError for invalid bytes, and EOFError at the end."""
        try:
            data = self.channel.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        yield from self._reader.feed(data)

    def has_data(self) -> bool:
        """Returns whether `read_messages` has bytes, or the end, to read."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        return bool(poller.poll(0))

    def read_output(self) -> bool:
        """Reads printed text. Returns False if the process has printed as much as one call may."""
        data = _read(self.output, min(1 << 16, self._allowance))
        if data is None:
            return True
        self._allowance -= len(data)
        self._output = (self._output + data)[-_OUTPUT_KEPT:]
        return bool(data) and self._allowance > 0

    def read_stacks(self) -> bool:
        """Reads the stacks of the threads. Returns False at the end of the pipe."""
        data = _read(self.stacks, 1 << 16)
        if data and len(self._stacks) < 1 << 18:
            self._stacks += data
        return data is None or bool(data)

    def read_guard(self) -> bool:
        """Reads the exit status. Returns False if the guard has ended, and with it all other processes."""
        try:
            data = self.guard.recv(1 << 10)
        except BlockingIOError:
            return True
        except ConnectionError:
            data = b""
        self._status += data
        return bool(data)

    def request_stacks(self) -> None:
        """Makes the process write the stacks of its threads."""
        with contextlib.suppress(OSError):
            self.guard.send(WRITE_STACKS)

    def kill(self) -> None:
        """Ends the process and its descendants."""
        self.has_ended = True
        with contextlib.suppress(OSError):
            self.guard.send(KILL)

    def close(self) -> None:
        """Closes the sockets and pipes, so that the guard ends all processes, and removes their temporary files."""
        for end in (self.channel, self.guard):
            end.close()
        for descriptor in (self.output, self.stacks, self._rows, self._reclaimed_rows):
            os.close(descriptor)
        if self._folder is not None:
            remove_tree(self._folder)

    def status(self) -> int | None:
        """Returns the exit status as in `subprocess`, or None if it is unknown."""
        try:
            return int(json.loads(self._status)["status"])
        except ValueError:
            return None

    def location(self) -> str:
        """Returns the innermost function and line of the call as text, or an empty text if it is unknown."""
        frames_of_threads = (
            [match.groupdict() for match in map(_FRAME.fullmatch, thread.splitlines()) if match]
            for thread in self._stacks.decode(errors="replace").split("\n\n")
        )
        for frames in frames_of_threads:
            depth = next((i for i, frame in enumerate(frames) if frame["file"] == reward_function.__file__), 0)
            if depth:
                return "; at the timeout it was in {function} ({file}, line {line})".format(**frames[0])
        return ""

    def last_output(self) -> str:
        """Returns the last printed text for an error message."""
        with contextlib.suppress(OSError):
            self.read_output()
        text = self._output.rpartition(CALL_START)[2].decode(errors="replace").strip()
        printed = f", after it printed more than {_OUTPUT_PER_CALL >> 20} MiB" if self._allowance <= 0 else ""
        return f"{printed}; its last output: {text}" if text else ""


def describe_end(owner: str, status: int | None) -> tuple[Literal["exited", "killed"], str]:
    """Returns the kind and the description of the end of a process during a call of `owner`, such as a function."""
    if status is None:
        return "killed", f"the process of {owner} ended (cause unknown)"
    if status >= 0:
        return "exited", f"{owner} ended its process with exit code {status}: return a value or raise an exception"
    number = signal.Signals(-status)
    is_kill = number is signal.SIGKILL
    cause = "sender unknown; the kernel sends it if the memory is exhausted" if is_kill else signal.strsignal(number)
    return "killed", f"the process of {owner} was killed by {number.name} ({cause})"


def _read(descriptor: int, size: int) -> bytes | None:
    """Returns bytes of a pipe, or None if there are none yet."""
    try:
        return os.read(descriptor, max(size, 1))
    except BlockingIOError:
        return None
