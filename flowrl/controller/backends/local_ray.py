"""Starts and stops a local Ray for this process, with private files and its own authentication token."""

import atexit
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray._private import ray_constants, services, worker
from ray._private import utils as ray_utils
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue] (compiled)

from flowrl.controller.errors import BackendError
from flowrl.controller.host.process_end import ProcessEnds, count_oom_kills
from flowrl.data.folders.private_folder import private_folder, remove_folder

_logger = logging.getLogger(__name__)

RAY_SETTINGS = {
    # The driver raises failures of calls. Ray would print the same failures again.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Lineage keeps the inputs of every live result in memory. flowrl does not recompute the results of a lost node.
    "RAY_lineage_pinning_enabled": "0",
    # With Ray's default niceness of 15, other processes, including the driver, starve the workers.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The run forks its own workers, so prestarted workers would be idle.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's head process keeps the events of up to 100,000 tasks (0 disables them). flowrl records its own calls.
    "RAY_task_events_report_interval_ms": "0",
    # The driver notices the end of its own raylet. If Ray declared the node dead, it would end the driver.
    "RAY_health_check_initial_delay_ms": "86400000",
}
"""Default environment variables of a local Ray."""

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable that limits Ray to the loopback interface. A local Ray and processes that join it set 0."""

_NEEDED = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
"""Processes without which a local Ray cannot run."""

_RAY_FOLDER = str(Path(ray.__file__).parent)
_END_TIMEOUT_S = 5.0
_AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class LocalRay:
    """A Ray on the loopback interface, with its files and its token in the private folder of this process.

    Authentication is always on. `RAY_AUTH_MODE` applies only to clusters.

    Args:
        num_cpus: number of CPUs that Ray offers to pools.
        ends: describes the ends of Ray's processes. None creates a new object.
        options: further arguments of `ray.init`.
    Raises:
        BackendError: Ray has not started in two attempts.
        ValueError: an option is invalid.
    """

    def __init__(self, num_cpus: int, ends: ProcessEnds | None = None, **options: Any) -> None:
        global _running
        self._ends = ends or ProcessEnds(count_oom_kills())
        self._end: str | None = None
        folder = private_folder()
        self._session, self._token = folder / "r", folder / "token"
        self._variables = {name: os.environ[name] for name in _AUTH_VARIABLES if name in os.environ}
        # A second attempt, because Ray waits only 30 s for each of its processes. A busy machine may need longer.
        for is_last in (False, True):
            try:
                self._start(num_cpus, options)
                break
            except ValueError:  # an invalid option
                raise
            except Exception as error:  # Ray raises Exception itself
                cause = str(error).rstrip(".")
                if is_last:
                    advice = "correct the cause"
                    if "timed out" in cause:
                        advice = (
                            "Ray waits 30 s for each of its processes, so end other programs, or free cores and memory"
                        )
                    raise BackendError(f"Ray has not started in two attempts ({cause}): {advice}") from error
                _logger.warning("Ray has not started (%s); one more attempt", cause)
        node: Any = worker._global_node  # None before ray.init
        self._watched = {name: node.all_processes[name][0].process for name in _NEEDED}
        _running = self

    def _start(self, num_cpus: int, options: dict[str, Any]) -> None:
        """Starts Ray with a new token. If the start fails, ends Ray's processes and deletes its files."""
        # At exit, before the private folder is deleted, because Ray writes to it.
        atexit.register(self.stop)
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        set_authentication({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)})
        with ExitStack() as on_error, _keep_signal_handlers(), _use_loopback():
            on_error.callback(self.stop)  # otherwise, an interrupt would leave processes of Ray
            ray.init(
                address="local",  # never join another Ray that runs on this machine
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=str(self._session),
                **options,
            )
            on_error.pop_all()

    def find_end(self) -> str | None:
        """Returns how a process that Ray needs has ended; None while all of them run. Takes microseconds."""
        if self._end is None:
            for name, process in self._watched.items():
                if (exit_code := process.poll()) is not None:
                    now_s = time.monotonic()
                    self._ends.record_oom_kills(count_oom_kills(), now_s)
                    end = self._ends.describe((name, process.pid), exit_code, now_s=now_s)
                    self._end = f"Ray's {name} on this machine has ended: {end}"
                    break
        return self._end

    def stop(self) -> None:
        """Stops Ray, deletes its files, and restores the environment variables of the authentication."""
        global _running
        _running = None
        ray.shutdown()
        self._kill_processes()
        remove_folder(self._session)
        self._token.unlink(missing_ok=True)
        set_authentication(self._variables)
        atexit.unregister(self.stop)

    def _kill_processes(self) -> None:
        """Kills Ray's processes. Ray itself does not end them if its start was interrupted."""
        import psutil  # noqa: PLC0415 (Ray has a copy of psutil, which can be imported after ray)

        deadline = time.monotonic() + _END_TIMEOUT_S
        while time.monotonic() < deadline:
            remaining = []
            # Searches all processes, because a process whose parent has ended is no longer a descendant.
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if process.status() == psutil.STATUS_ZOMBIE:
                        continue  # only its parent can remove it
                    # Programs that the user has started have the token too.
                    is_ray = process.name().startswith("ray::") or any(_RAY_FOLDER in w for w in process.cmdline())
                    if is_ray and process.environ().get("RAY_AUTH_TOKEN_PATH") == str(self._token):
                        remaining.append(process)
                        process.kill()
            if not remaining:
                return
            # The next iteration finds processes that these processes have started in the meantime.
            psutil.wait_procs(remaining, timeout=max(0.0, deadline - time.monotonic()))


_running: LocalRay | None = None
"""The local Ray of this process."""


def find_local_end() -> str | None:
    """Returns why this process's local Ray has ended. Returns None if it runs, or if there is no local Ray.

    Call this function before functions of Ray. Without its raylet, most of them would end this process immediately,
    with exit code 1 and without an exception.
    """
    return None if _running is None else _running.find_end()


def set_authentication(variables: Mapping[str, str]) -> None:
    """Replaces the environment variables of Ray's authentication, and clears Ray's cached values in this process."""
    for name in _AUTH_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _use_loopback() -> Iterator[None]:
    """Makes a Ray that starts in this block listen on the loopback interface only.

    Ray does so by default on Windows and macOS. `_node_ip_address` has no effect, because Ray replaces loopback
    addresses by the address of the machine.
    """
    previous = os.environ.get(LOOPBACK_VARIABLE), ray_constants.ENABLE_RAY_CLUSTER
    # Ray read the variable into the constant when it was imported. Ray's processes inherit the variable.
    os.environ[LOOPBACK_VARIABLE], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        del os.environ[LOOPBACK_VARIABLE]
        if previous[0] is not None:
            os.environ[LOOPBACK_VARIABLE] = previous[0]
        ray_constants.ENABLE_RAY_CLUSTER = previous[1]


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Keeps the program's handler of SIGTERM, which Ray would replace, and delays signals while Ray forks a process.

    Python ignores an exception that a signal handler raises during `os.fork`. An exception between fork and exec would
    leave a child process that Ray does not track.
    """
    has_handler = callable(signal.getsignal(signal.SIGTERM))
    start_process, set_handler = services.start_ray_process, ray_utils.set_sigterm_handler

    def start_process_undisturbed(*args: Any, **kwargs: Any) -> Any:  # Any: Ray's own signature
        with _delay_signals():
            return start_process(*args, **kwargs)

    if threading.current_thread() is not threading.main_thread():
        yield  # the handlers run on the main thread
        return
    services.start_ray_process = start_process_undisturbed
    if has_handler:
        ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.start_ray_process, ray_utils.set_sigterm_handler = start_process, set_handler


@contextmanager
def _delay_signals() -> Iterator[None]:
    """Delays SIGINT, SIGTERM and SIGHUP. Their handlers run at the end of the block."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in previous.items() if callable(handler)}
    is_delayed = True

    def handle(number: int, frame: FrameType | None) -> None:
        if is_delayed:
            received.append(number)
        else:  # the program's handler of another signal has raised before this handler was replaced
            handlers[signal.Signals(number)](number, frame)

    try:
        for number in handlers:
            signal.signal(number, handle)
        yield
    finally:
        is_delayed = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)
