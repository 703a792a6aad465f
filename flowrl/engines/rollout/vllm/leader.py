"""Leader process of a vLLM replica with several devices. It starts and calls the worker processes, and exits if a
worker process exits. A replica on several nodes has a follower on each further node, which starts the workers there.
"""

import atexit
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing import active_children, connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import torch
from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from flowrl.data.console import write_printable
from flowrl.data.folders.private_folder import create_folder
from flowrl.engines.rollout.base import RolloutError

_THREADS = "OMP_NUM_THREADS"
_SOCKETS = "VLLM_RPC_BASE_PATH"
_HOST = "VLLM_HOST_IP"
_MAX_PARENT_BYTES = 49
"""Paths of Unix sockets have at most 107 bytes. Those of vLLM are PARENT/flowrl-vllm-12345678/UUID, with 36 for the
UUID.
"""
_PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""Prefix of vLLM's log lines: process and source location."""
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)(: .+)?$")
_WORKER_FAILED = "initialization failed due to an exception in a background process"
"""Error message of vLLM if a worker process fails to start."""

_LAST_LINES = 40
_SEGMENTS = Path("/dev/shm")

_POLL_S = 0.1
_is_exiting = threading.Event()

Run = Callable[..., Callable[[], object]]
"""Starts `engine.run_follower` on another node with the given arguments, and returns a function that waits for its
end.
"""


def start_engine(args: EngineArgs, runs: Sequence[Run] = (), address: str = "127.0.0.1") -> LLMEngine:
    """Starts vLLM with the engine core in this process. With several devices, each has a worker process.

    Args:
        args: vLLM's arguments for all devices of the replica.
        runs: one function per follower, in the order of their nodes.
        address: IP address of this process for the followers.
    Raises RolloutError with the worker's last error if a worker process fails to start.
    """
    num_devices = args.tensor_parallel_size * args.pipeline_parallel_size
    if num_devices == 1:
        return LLMEngine.from_engine_args(args)
    num_local = num_devices // (1 + len(runs))
    output = tempfile.TemporaryFile()  # noqa: SIM115 (the workers write to it as long as they run)
    with _redirect_output(output.fileno()), _threads_for(num_local), _temporary_sockets(), _variable(_HOST, address):
        if runs:
            with socket.create_server((address, 0)) as server:  # finds a free port
                port = server.getsockname()[1]
            args = replace(args, nnodes=1 + len(runs), master_addr=address, master_port=port)
        followers = Followers(args, runs)
        try:
            engine = LLMEngine.from_engine_args(args)
        except Exception as error:  # vLLM raises Exception itself
            followers.end_start([])
            if followers.error is None and _WORKER_FAILED not in str(error):
                raise
            cause = followers.error or _last_error(_read(output))
            raise RolloutError(f"vLLM could not start {num_devices} workers: {cause}") from error
    call_workers(engine, "follow_leader")
    call_workers(engine, "allocate_received_states")
    workers = _release_files(engine.model_executor)
    atexit.register(_is_exiting.set)  # runs before vLLM ends the workers, whose function was registered earlier
    _exit_with_workers(workers, output)
    followers.end_start(workers)
    return engine


def run_workers(address: str, args: EngineArgs) -> None:
    """Runs the workers of a replica on this node until one of them ends. The leader on another node sends their calls.

    Args:
        address: IP address of this node.
        args: vLLM's arguments, with the address of the leader and the rank of this node.
    Raises RolloutError with the error or the last output of the workers.
    """
    num_local = args.tensor_parallel_size * args.pipeline_parallel_size // args.nnodes
    with tempfile.TemporaryFile() as output, _redirect_output(output.fileno()), _variable(_HOST, address):
        config = args.create_engine_config(headless=True)
        with _threads_for(num_local), _temporary_sockets():
            try:
                executor = MultiprocExecutor(config, monitor_workers=False)
            except Exception as error:  # vLLM raises Exception itself
                raise RolloutError(f"{_last_error(_read(output))} (on {address})") from error
        workers = _release_files(executor)
        connection.wait([worker.sentinel for worker in workers])
        raise RolloutError("\n".join([f"a vLLM worker process on {address} exited:", *_last_lines(output)]))


class Followers:
    """The followers of a replica. If one fails, so does the replica."""

    def __init__(self, args: EngineArgs, runs: Sequence[Run]) -> None:
        """Starts the followers. If a follower fails before vLLM has started, kills the workers of the leader, because
        they would wait for its workers without end.
        """
        self.error: Exception | None = None
        """Error of the follower that failed first."""
        self._workers: list[BaseProcess] = []
        """Workers of the leader, after its start."""
        self._is_starting = True
        # The variables of vLLM include its deterministic mode, to which that of cuBLAS belongs.
        variables = {
            name: value
            for name, value in os.environ.items()
            if name in (_THREADS, "CUBLAS_WORKSPACE_CONFIG") or name.startswith("VLLM_")
            if name not in (_SOCKETS, _HOST)
        }
        for node_rank, run in enumerate(runs, 1):
            wait = run(replace(args, node_rank=node_rank), variables)
            threading.Thread(target=self._watch, args=(wait,), daemon=True, name="flowrl-follower").start()

    def _watch(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except Exception as error:  # noqa: BLE001 (the main thread raises it)
            self.error = self.error or error
        while self._is_starting:
            for process in active_children():
                process.kill()
            time.sleep(_POLL_S)
        if self._workers:
            _exit(self._workers, str(self.error))

    def end_start(self, workers: list[BaseProcess]) -> None:
        """Ends the start of the leader, which has these workers, or none if it has failed. From now on, the end of a
        follower ends this process and its workers.
        """
        self._workers, self._is_starting = workers, False


def _release_files(executor: Any) -> list[BaseProcess]:  # Any: a multiprocessing executor, which vLLM does not type
    """Returns the worker processes of an executor, whose shared memory disappears from now on with the last process."""
    workers = [worker.proc for worker in executor.workers]
    _unlink_shared_memory([os.getpid(), *(worker.pid for worker in workers)])
    return workers


def _unlink_shared_memory(process_ids: list[int]) -> None:
    """Unlinks the /dev/shm segments of these processes. The kernel then frees the memory when the last process exits.

    Without this, segments leak when Ray kills a process. Segments are matched by inode, because the mapped name of a
    semaphore differs from its file name.
    """
    if not _SEGMENTS.is_dir():
        return
    mapped = {
        int(fields[4])
        for process_id in process_ids
        for line in Path(f"/proc/{process_id}/maps").read_text().splitlines()
        if len(fields := line.split(maxsplit=5)) == 6 and fields[5].startswith(f"{_SEGMENTS}/")
    }
    for segment in list(os.scandir(_SEGMENTS)):
        if segment.inode() in mapped:
            os.unlink(segment)


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


def call_workers(engine: LLMEngine, method: str, *args: Any) -> None:  # Any: the method's own
    """Calls a method of vLLM's worker on every device. If workers raise, raises RuntimeError with the first worker's
    error.
    """
    for rank, failure in enumerate(engine.collective_rpc("attempt", args=(method, *args))):
        if failure is not None:
            cause, trace = failure
            error = RuntimeError(f"{cause} (vLLM's worker {rank})")
            error.add_note(trace)
            raise error


def _last_error(text: str) -> str:
    """Returns the last error line in the workers' output, ignoring vLLM's own summary."""
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and set(line) - set("^~ ") and _WORKER_FAILED not in line]
    for before, line in reversed([*pairwise(["", *lines])]):
        if match := _ERROR.match(line):
            # An assertion without a message: the line before it has the condition.
            return line if match[1] else f"{line}: {before}"
    return "\n".join(lines[-3:]) or "no output"


@contextmanager
def _threads_for(num_processes: int) -> Iterator[None]:
    """Divides this process's threads evenly among the worker processes. The leader needs none, because it does not
    compute.
    """
    with _variable(_THREADS, str(max(1, torch.get_num_threads() // num_processes))):
        yield


@contextmanager
def _temporary_sockets() -> Iterator[None]:
    """Unlinks the sockets that vLLM creates inside the `with` block. Connections that exist then remain.

    Without this, sockets remain in the temporary folder when Ray kills a process. They are in /tmp if the path of the
    temporary folder is too long for sockets.
    """
    parent = Path(tempfile.gettempdir()).absolute()
    parent = parent if len(os.fsencode(parent)) <= _MAX_PARENT_BYTES else Path("/tmp")
    with create_folder("vllm", parent) as folder, _variable(_SOCKETS, str(folder)):
        yield


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside the `with` block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _redirect_output(file: int) -> Iterator[None]:
    """Redirects stdout and stderr to a file inside the `with` block. Processes that are started in the block stay
    redirected.
    """
    streams = {1: sys.stdout, 2: sys.stderr}
    own = {number: os.dup(number) for number in streams}
    try:
        for number, stream in streams.items():
            stream.flush()
            os.dup2(file, number)
        yield
    finally:
        for number, stream in streams.items():
            stream.flush()
            os.dup2(own[number], number)
            os.close(own[number])


def _exit_with_workers(processes: list[BaseProcess], output: IO[bytes]) -> None:
    """Starts a watchdog thread. If a worker process exits before this process, the thread ends all processes of the
    replica.

    The watchdog prints the workers' last output. The controller then replaces the complete replica.
    """

    def watch() -> None:
        connection.wait([process.sentinel for process in processes])
        lines = _last_lines(output)
        _exit(processes, "\n".join(["a vLLM worker process exited; last output of the workers:", *lines]))

    threading.Thread(target=watch, daemon=True, name="flowrl-exit-with-workers").start()


def _last_lines(output: IO[bytes]) -> list[str]:
    return _read(output).splitlines()[-_LAST_LINES:]


def _exit(workers: list[BaseProcess], message: str) -> None:
    """Ends this process and its workers, and prints a message. Does nothing if this process is exiting already."""
    if _is_exiting.is_set():
        return
    for worker in workers:
        worker.kill()
    write_printable(f"{message}\n", sys.stderr)
    sys.stderr.flush()
    os._exit(1)
