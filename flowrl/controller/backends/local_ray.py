"""Starts a Ray of this process on this machine, with private files and its own token, and stops it."""

import atexit
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue] (compiled)

from flowrl.controller.host.private_folder import private_folder, remove_folder

RAY_SETTINGS = {
    # The driver raises failures of calls. Ray would print the same failures again.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Lineage keeps the inputs of every live result in memory, to recompute results of a lost node. flowrl does not.
    "RAY_lineage_pinning_enabled": "0",
    # With Ray's default niceness of 15, other processes, including the driver, starve the workers.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The run forks its own workers, so prestarted workers would be idle.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's head process keeps the events of up to 100,000 tasks (0 disables them). flowrl records its own calls.
    "RAY_task_events_report_interval_ms": "0",
}
"""Default environment variables of a local Ray."""

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable that is 0 in the processes of a local Ray, and in a process that joins it."""

_RAY_FOLDER = str(Path(ray.__file__).parent)
_END_TIMEOUT_S = 5.0
_AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class LocalRay:
    """A Ray on the loopback interface, with its files and its token in the private folder of this process.

    Authentication is always on. `RAY_AUTH_MODE` applies only to clusters.
    """

    def __init__(self, num_cpus: int, **options: Any) -> None:
        """Starts Ray. `options` are further arguments of `ray.init`."""
        folder = private_folder()
        self._session, self._token = folder / "r", folder / "token"
        self._variables = {name: os.environ[name] for name in _AUTH_VARIABLES if name in os.environ}
        # At exit, before the private folder is deleted, because Ray writes to it.
        atexit.register(self.stop)
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        _set_authentication({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)})
        with _keep_sigterm_handler(self.stop), _use_loopback():
            ray.init(
                address="local",  # never join another Ray that runs on this machine
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=str(self._session),
                **options,
            )

    def stop(self) -> None:
        """Stops Ray, deletes its files, and restores the environment variables of the authentication."""
        ray.shutdown()
        self._kill_processes()
        remove_folder(self._session)
        self._token.unlink(missing_ok=True)
        _set_authentication(self._variables)
        atexit.unregister(self.stop)

    def _kill_processes(self) -> None:
        """Kills Ray's processes. Ray itself does not end them if its start was interrupted."""
        import psutil  # noqa: PLC0415 (Ray has a copy of psutil, which can be imported after ray)

        remaining = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                # Programs that the user has started have the token too.
                is_ray = process.name().startswith("ray::") or any(_RAY_FOLDER in word for word in process.cmdline())
                if is_ray and process.environ().get("RAY_AUTH_TOKEN_PATH") == str(self._token):
                    remaining.append(process)
                    process.kill()
        psutil.wait_procs(remaining, timeout=_END_TIMEOUT_S)


def _set_authentication(variables: Mapping[str, str]) -> None:
    """Sets the environment variables of Ray's authentication, which Ray has cached in this process."""
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
    # Ray has read the variable at its import. Ray's processes inherit it.
    os.environ[LOOPBACK_VARIABLE], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        del os.environ[LOOPBACK_VARIABLE]
        if previous[0] is not None:
            os.environ[LOOPBACK_VARIABLE] = previous[0]
        ray_constants.ENABLE_RAY_CLUSTER = previous[1]


@contextmanager
def _keep_sigterm_handler(stop: Callable[[], None]) -> Iterator[None]:
    """Restores the program's handler of SIGTERM, which Ray replaces by an exit. Calls `stop` if Ray cannot start."""
    previous = signal.getsignal(signal.SIGTERM)
    has_handler = callable(previous) and threading.current_thread() is threading.main_thread()
    try:
        yield
    except BaseException as error:
        stop()
        if has_handler and isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            signal.signal(signal.SIGTERM, previous)
            signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        if has_handler:
            signal.signal(signal.SIGTERM, previous)
