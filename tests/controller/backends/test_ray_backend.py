"""A host of the Ray backend handles retried calls after a loss of its process, in any order."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ray._private import worker as ray_worker

from flowrl.controller.backends import local_ray
from flowrl.controller.backends.base import RAY_LOGGER
from flowrl.controller.backends.ray_backend import RayBackend
from flowrl.controller.errors import BackendError, ProcessLost
from flowrl.data.folders.private_folder import private_folder
from tests.conftest import ClusterMaker
from tests.controller.faulty_workers import Scorer
from tests.errors import missing_facts


def test_messages_of_ray_are_logged_and_not_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    backend = RayBackend(None, print)
    with caplog.at_level(logging.INFO, RAY_LOGGER):
        ray_worker.print_to_stdstream({"lines": ["a worker died"], "pid": "raylet", "is_err": False}, False)
    assert caplog.messages == ["a worker died"] and capsys.readouterr() == ("", "")
    assert "print_to_stdstream" in ray_worker.listen_error_messages.__code__.co_names  # Ray calls the replaced function
    backend.close()
    assert ray_worker.print_to_stdstream.__module__ == ray_worker.__name__


def test_a_failed_connection_does_not_change_how_ray_prints_messages() -> None:
    with pytest.raises(BackendError):
        RayBackend("127.0.0.1:1", print)
    assert ray_worker.print_to_stdstream.__module__ == ray_worker.__name__


def temporary_folders(worker: Any) -> tuple[str, str, str, str]:
    """Returns the temporary folder of this process and of a child process, the folder of a new file, and torch's
    cache.
    """
    command = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
    child = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    _, file = tempfile.mkstemp()
    return tempfile.gettempdir(), child, str(Path(file).parent), os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_temporary_files_of_workers_are_in_the_private_folder(open_cluster: ClusterMaker, ray_session: None) -> None:
    cluster = open_cluster("ray", {"main": [1]}, {"judge": "main"}, num_threads=1)
    ((*folders, cache),) = cluster.group("judge", Scorer, 1).run(temporary_folders)
    assert folders == [str(private_folder() / "t")] * 3
    assert Path(cache).parent == Path(tempfile.gettempdir())


@pytest.mark.slow
def test_a_restart_does_not_end_a_process_that_is_already_a_replacement(
    open_cluster: ClusterMaker, ray_session: None
) -> None:
    cluster = open_cluster("ray", {"main": [1]}, {"judge": "main"}, num_threads=1)
    judge, (slot,) = cluster.group("judge", Scorer, 1), cluster.plan.pools["main"].slots
    (lost,) = judge.process_id()
    os.kill(lost, signal.SIGKILL)
    (replacement,) = judge.process_id()
    cluster._backend.restart(slot, lost)
    assert judge.process_id() == [replacement] != [lost]
    cluster._backend.restart(slot, replacement)
    (next_replacement,) = judge.process_id()
    assert next_replacement not in (lost, replacement)
    cluster._backend.restart(slot, None)
    assert judge.process_id()[0] not in (lost, replacement, next_replacement)


def test_a_call_after_the_end_of_the_raylet_names_it_as_the_cause(
    ray_session: None, open_cluster: ClusterMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = open_cluster("ray", {"main": [1]}, {"judge": "main"}, num_threads=1)
    judge = cluster.group("judge", Scorer, 1)
    judge.process_id()
    running: Any = local_ray._running
    with subprocess.Popen([sys.executable, "-ISc", "import os; os.kill(os.getpid(), 9)"]) as ended:
        ended.wait()
    monkeypatch.setattr(running, "_end", None)  # undoes its change by the test
    monkeypatch.setitem(running._watched, "raylet", ended)
    with pytest.raises(ProcessLost) as lost:
        judge.process_id()
    assert lost.value.role == "judge" and not missing_facts(lost.value.cause, "raylet", "SIGKILL")
    assert cluster.has_lost_nodes()


STOPPED = """
import os
import signal
import time
from flowrl import Cluster, Placement
from flowrl.data.folders.process_stat import read_start_time
from tests.controller.faulty_workers import Scorer

with Cluster(Placement(device="cpu", pools={"main": [1]}, roles={"judge": "main"}), num_threads=1) as cluster:
    (process_id,) = cluster.group("judge", Scorer, 1).run(lambda worker: os.getpid())
    os.kill(process_id, signal.SIGSTOP)
deadline = time.monotonic() + 5
while read_start_time(process_id) is not None:
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_a_stopped_process_ends_with_the_cluster() -> None:
    with tempfile.TemporaryDirectory(prefix="fl", dir="/tmp") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder}
        command = [sys.executable, "-c", STOPPED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
