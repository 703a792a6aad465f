"""The process that leads the devices of a vLLM replica: it starts those that compute, calls them and ends with them."""

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

from flowrl.engines.rollout.responses import RolloutError

_THREADS = "OMP_NUM_THREADS"
_PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""What vLLM puts before each line: the process, and where the line comes from."""
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)(: .+)?$")
_IN_A_WORKER = "initialization failed due to an exception in a background process"
"""vLLM's word for it."""


_LAST_LINES = 40
_SEGMENTS = Path("/dev/shm")


def start_engine(args: EngineArgs) -> LLMEngine:
    """Starts vLLM, whose core is in this process; with several devices each has a process of its own.

    Raises: RolloutError where one of those could not start, with what it said last.
    """
    if args.tensor_parallel_size == 1:
        return LLMEngine.from_engine_args(args)
    said = tempfile.TemporaryFile()  # noqa: SIM115 (what the workers print as long as they run)
    with _output_to(said.fileno()), _threads_for(args.tensor_parallel_size):
        try:
            engine = LLMEngine.from_engine_args(args)
        except Exception as error:
            if _IN_A_WORKER not in str(error):
                raise
            raise RolloutError(
                f"vLLM could not start a process for each of {args.tensor_parallel_size} devices: "
                f"{_last_error(_text(said))}"
            ) from error
    call_workers(engine, "end_with_leader")
    executor: Any = engine.model_executor  # of several processes
    workers = [worker.proc for worker in executor.workers]
    _forget_shared_memory([os.getpid(), *(worker.pid for worker in workers)])
    _end_with(workers, said)
    return engine


def _forget_shared_memory(process_ids: list[int]) -> None:
    """Takes their names from the segments that processes have mapped, so that the last to end frees the memory.

    What vLLM's processes talk through has names to be found by while they start, and is left behind by those that are
    killed, which is how the process of a worker ends in Ray. A semaphore is mapped under another name than its own, so
    segments are told by their inodes.
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


def _text(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read().decode(errors="replace")


def call_workers(engine: LLMEngine, method: str, *args: Any) -> None:  # Any: the method's own
    """Calls a method of vLLM's worker on every device. Raises RuntimeError with what it raised on the first."""
    for rank, failure in enumerate(engine.collective_rpc("attempt", args=(method, *args))):
        if failure is not None:
            cause, trace = failure
            error = RuntimeError(f"{cause} (vLLM's worker {rank})")
            error.add_note(trace)
            raise error


def _last_error(text: str) -> str:
    """The cause in what processes have printed: the last line that is an error, but for vLLM's own summary."""
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and set(line) - set("^~ ") and _IN_A_WORKER not in line]
    for before, line in reversed([*pairwise(["", *lines])]):
        if found := _ERROR.match(line):
            # An assertion without a message says in its own line what was not so.
            return line if found[1] else f"{line}: {before}"
    return "\n".join(lines[-3:]) or "it said nothing"


@contextmanager
def _threads_for(num_processes: int) -> Iterator[None]:
    """Shares this process's threads out among those that are started: it computes nothing itself."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = str(max(1, torch.get_num_threads() // num_processes))
    try:
        yield
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before


@contextmanager
def _output_to(file: int) -> Iterator[None]:
    """Has a file take what this process prints meanwhile, and what those print that it starts, as long as they run."""
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


def _end_with(processes: list[BaseProcess], said: IO[bytes]) -> None:
    """Ends this process when one of these has ended, and with it the others, which may wait for that one. What they
    have printed is told first.

    vLLM would notice too, raise in whatever is called next, and be of no use from then on; a process that has ended is
    replaced.
    """

    def watch() -> None:
        connection.wait([process.sentinel for process in processes])
        for process in processes:
            process.kill()
        lines = _text(said).splitlines()[-_LAST_LINES:]
        sys.stderr.write("\n".join(["a process of vLLM has ended; the last that these have said:", *lines, ""]))
        sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="flowrl-end-with-workers").start()
