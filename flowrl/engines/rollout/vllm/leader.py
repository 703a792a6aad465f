"""Leader process of a vLLM replica with several devices. It starts and calls the worker processes, and exits if a
worker process exits.
"""

import atexit
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import torch
from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from flowrl.data.console import write_printable
from flowrl.data.folders.private_folder import create_folder
from flowrl.engines.rollout.base import RolloutError

_THREADS = "OMP_NUM_THREADS"
_SOCKETS = "VLLM_RPC_BASE_PATH"
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


def start_engine(args: EngineArgs) -> LLMEngine:
    """Starts vLLM with the engine core in this process. With several devices, each has a worker process.

    Raises RolloutError with the worker's last error if a worker process fails to start.
    """
    num_devices = args.tensor_parallel_size * args.pipeline_parallel_size
    if num_devices == 1:
        return LLMEngine.from_engine_args(args)
    output = tempfile.TemporaryFile()  # noqa: SIM115 (the workers write to it as long as they run)
    with _redirect_output(output.fileno()), _threads_for(num_devices), _temporary_sockets():
        try:
            engine = LLMEngine.from_engine_args(args)
        except Exception as error:  # vLLM raises Exception itself
            if _WORKER_FAILED not in str(error):
                raise
            raise RolloutError(f"vLLM could not start {num_devices} workers: {_last_error(_read(output))}") from error
    call_workers(engine, "follow_leader")
    call_workers(engine, "allocate_received_states")
    executor: Any = engine.model_executor  # the multiprocessing executor, which vLLM does not type
    workers = [worker.proc for worker in executor.workers]
    _unlink_shared_memory([os.getpid(), *(worker.pid for worker in workers)])
    _exit_with_workers(workers, output)
    return engine


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
    is_exiting = threading.Event()
    atexit.register(is_exiting.set)  # runs before vLLM ends the workers, whose function was registered earlier

    def watch() -> None:
        connection.wait([process.sentinel for process in processes])
        if is_exiting.is_set():
            return
        for process in processes:
            process.kill()
        lines = _read(output).splitlines()[-_LAST_LINES:]
        message = "\n".join(["a vLLM worker process exited; last output of the workers:", *lines, ""])
        write_printable(message, sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="flowrl-exit-with-workers").start()
