"""Forked processes equal processes started by Python, and end with their driver or server."""

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrl import Batch
from flowrl.controller.host.fork_server import PRELOADED, ForkServer
from flowrl.data.folders.private_folder import create_folder
from tests.conftest import ClusterMaker
from tests.controller.faulty_workers import Scorer

REPORT_PROGRAM = """
import json, os, random, sys
drawn = [random.random()] + [module.random.random() for name, module in sys.modules.items() if name == "numpy"]
facts = {"pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ),
        "name": __name__, "path": sys.path[0], "modules": sorted(sys.modules),
        "drawn": drawn, "threads": len(os.listdir("/proc/self/task"))}
open(sys.argv[1], "w").write(json.dumps(facts))
print("output")
print("errors", file=sys.stderr)
sys.exit(3)
"""


PREPARED = "flowrl.workers"
"""Module that the server of the tests imports in addition. It imports torch."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Starts a server, and a first program, which waits for the imports of the server."""
    server, folder = ForkServer((PREPARED,)), tmp_path_factory.mktemp("first")
    (folder / "program.py").write_text(REPORT_PROGRAM)
    start(server.py_executable, folder / "program.py", folder / "facts")
    yield server
    server.end()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(REPORT_PROGRAM)
    return file


@functools.cache
def raylet() -> str:
    """Returns the path of a shell with the name of Ray's raylet, whose child processes the server accepts."""
    return str(shutil.copy("/bin/bash", create_folder("raylet").path / "raylet"))


def start(py_executable: str, program: Path, result: Path, **settings: Any) -> tuple[dict[str, Any], str, str]:
    """Returns the facts that the program writes about its process, its output and its errors."""
    command = [raylet(), "-c", f"{py_executable} {program} {result} 'two words'; exit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, **settings)
    wait(result.exists)
    wait(lambda: bool(result.read_text()))
    return json.loads(result.read_text()), done.stdout, done.stderr


def wait(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_forked_process_equals_one_started_by_python(server: ForkServer, program: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "OWN": "value\nof two lines"}
    folder = tmp_path / "folder"
    folder.mkdir()
    facts, output, errors = start(server.py_executable, program, tmp_path / "facts", env=environment, cwd=folder)
    assert facts["argv"] == [str(program), str(tmp_path / "facts"), "two words"]
    assert facts["cwd"] == str(folder) and facts["name"] == "__main__" and facts["path"] == str(program.parent)
    assert facts["env"].items() >= environment.items() and "HOME" not in facts["env"]
    assert output == "output\n" and errors == "errors\n"
    parent = psutil.Process(facts["parent"])
    assert parent.ppid() == os.getpid()
    assert {"torch", PREPARED, *PRELOADED} <= set(facts["modules"]) and "ray" not in facts["modules"]


@pytest.mark.slow
def test_the_server_has_one_thread_and_leaves_no_zombies(server: ForkServer, program: Path, tmp_path: Path) -> None:
    facts, _, _ = start(server.py_executable, program, tmp_path / "facts")
    assert facts["threads"] == 1
    wait(lambda: not psutil.pid_exists(facts["pid"]))


NAMED_PROGRAM = """
import json, os, sys
from flowrl.controller.host.fork_server import survive_fork_server
survive_fork_server("named")
open(sys.argv[1], "w").write(json.dumps({"pid": os.getpid()}))
os._exit(5)
"""


@pytest.mark.slow
def test_the_exit_code_of_the_newest_process_with_a_name_is_known(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "named.py"
    program.write_text(NAMED_PROGRAM)
    for attempt in range(2):
        facts, _, _ = start(server.py_executable, program, tmp_path / f"facts{attempt}")
        end = server.find_exit("named", timeout_s=60.0)
        assert end is not None and (end[0], os.waitstatus_to_exitcode(end[1])) == (facts["pid"], 5)
        assert server.find_ended(["named", "unknown"]) == ["named"]
        assert server.find_ended(["named", "unknown"]) == []
    assert server.find_exit("unknown") is None


@pytest.mark.slow
def test_forked_processes_have_different_random_numbers(server: ForkServer, program: Path, tmp_path: Path) -> None:
    drawn = [start(server.py_executable, program, tmp_path / f"facts{i}")[0]["drawn"] for i in range(2)]
    assert len(drawn[0]) == 2 and not set(drawn[0]) & set(drawn[1])


def test_without_a_server_the_process_is_started_by_python(program: Path, tmp_path: Path) -> None:
    server = ForkServer()
    server.end()
    facts, output, _ = start(server.py_executable, program, tmp_path / "facts")
    assert output == "output\n" and "torch" not in facts["modules"]
    assert facts["argv"] == [str(program), str(tmp_path / "facts"), "two words"]


@pytest.mark.slow
def test_the_server_looks_for_gpus_without_the_cuda_driver(server: ForkServer, program: Path, tmp_path: Path) -> None:
    facts, _, _ = start(server.py_executable, program, tmp_path / "facts")
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    assert f"{name}=1".encode() in Path(f"/proc/{facts['parent']}/environ").read_bytes().split(b"\0")
    assert name not in facts["env"]


USES_CUDA = """
import torch
torch.cuda._initialized = True  # as after the first use of a GPU
"""


@pytest.mark.slow
def test_a_server_that_has_used_cuda_forks_nothing(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uses_cuda.py").write_text(USES_CUDA)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ForkServer(("uses_cuda",))
    facts, output, _ = start(server.py_executable, program, tmp_path / "facts")
    assert output == "output\n" and "torch" not in facts["modules"]
    wait(lambda: not server.is_running)
    server.end()


@pytest.mark.slow
def test_an_invalid_start_request_does_not_affect_others(server: ForkServer, program: Path, tmp_path: Path) -> None:
    code = f"""
import socket
for words in (b"", bytes(2), bytes([0, 0, 0, 9]) + b"{{", bytes([0, 0, 0, 2]) + b"{{}}"):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect({server.py_executable.split()[-1]!r})
        client.sendall(words)
"""
    command = [raylet(), "-c", f"{shlex.join([sys.executable, '-c', code])}; exit"]
    subprocess.run(command, timeout=200, check=True)
    assert PREPARED in start(server.py_executable, program, tmp_path / "facts")[0]["modules"]


@pytest.mark.parametrize("ancestors", [[], ["shell"], ["shell", "raylet"]])
def test_only_child_processes_of_the_raylet_start_programs(
    server: ForkServer, program: Path, tmp_path: Path, ancestors: list[str]
) -> None:
    """Reward functions and environments run as the same user, and may know the path of the socket."""
    command = [sys.executable, "-c", ATTACK, server.py_executable.split()[-1], str(program), str(tmp_path / "facts")]
    for name in reversed(ancestors):  # the first is a child of the driver
        command = ["bash" if name == "shell" else raylet(), "-c", f"{shlex.join(command)}; exit"]
    assert subprocess.run(command, capture_output=True, timeout=200, check=True).stdout == b"refused\n"
    assert PREPARED in start(server.py_executable, program, tmp_path / "later")[0]["modules"]
    assert not (tmp_path / "facts").exists()


ATTACK = """
import json, socket, sys
path, *argv = sys.argv[1:]
request = json.dumps({"argv": argv, "env": {}, "cwd": "/"}).encode()
with socket.socket(socket.AF_UNIX) as client:
    client.connect(path)
    try:
        socket.send_fds(client, [len(request).to_bytes(4, "big")], [1, 2])
        client.sendall(request)
        answer = client.recv(1)
    except ConnectionError:
        answer = b""
print("started" if answer else "refused")
"""
"""Requests a process from the fork server as its client does."""


@pytest.mark.slow
def test_the_server_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    print_child = "print(psutil.Process().children()[0].pid, flush=True)"
    code = f"import psutil; from {ForkServer.__module__} import ForkServer; s = ForkServer(); {print_child}; input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        process = psutil.Process(int(driver.stdout.readline()))
        driver.send_signal(signal.SIGKILL)
    wait(lambda: not process.is_running())


SURVIVES = """
import os, sys, time
from pathlib import Path
from flowrl.controller.host.fork_server import survive_fork_server
folder, name = Path(sys.argv[1]), sys.argv[2]
if name == "host":
    survive_fork_server("worker")
(folder / f"{name}.partial").write_text(str(os.getpid()))
(folder / f"{name}.partial").rename(folder / name)
deadline = time.monotonic() + 300
while not (folder / "continue").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
(folder / f"{name} continued").touch()
"""


def start_survivors(server: ForkServer, folder: Path) -> tuple[psutil.Process, psutil.Process]:
    """Returns a forked process with a host, and one whose host is not constructed yet. Ray does not know the second."""
    program = folder / "survives.py"
    program.write_text(SURVIVES)
    for name in ("host", "none"):
        command = f"{server.py_executable} {program} {folder} {name}; exit"
        subprocess.run([raylet(), "-c", command], stdout=subprocess.DEVNULL, timeout=200, check=True)
        wait((folder / name).exists)
    host, none = (psutil.Process(int((folder / name).read_text())) for name in ("host", "none"))
    return host, none


def test_all_forked_processes_end_with_the_server(tmp_path: Path) -> None:
    """A stopped host cannot notice that Ray has ended."""
    server = ForkServer()
    host, none = start_survivors(server, tmp_path)
    host.suspend()
    try:
        server.end()
        wait(lambda: not is_alive(none) and not is_alive(host), timeout_s=10.0)
    finally:
        (tmp_path / "continue").touch()
        if is_alive(host):
            host.kill()


@pytest.mark.slow
def test_only_processes_with_a_host_outlive_a_killed_server(tmp_path: Path) -> None:
    """Ray ends them. The run can continue without a fork server."""
    server = ForkServer()
    host, none = start_survivors(server, tmp_path)
    psutil.Process(host.ppid()).kill()
    wait(lambda: not is_alive(none), timeout_s=60.0)
    (tmp_path / "continue").touch()
    wait((tmp_path / "host continued").exists, timeout_s=60.0)
    wait(lambda: not is_alive(host), timeout_s=60.0)
    assert not (tmp_path / "none continued").exists()
    server.end()


@pytest.mark.slow
def test_a_process_that_is_started_by_python_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is Ray, which does not end processes that are still starting."""
    program = tmp_path / "survives.py"
    program.write_text(SURVIVES)
    server = ForkServer()
    server.end()
    command = f"{server.py_executable} {program} {tmp_path} none; true"  # the shell stays the parent
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.DEVNULL) as parent:
        wait((tmp_path / "none").exists)
        process = psutil.Process(int((tmp_path / "none").read_text()))
        parent.kill()
    wait(lambda: not is_alive(process), timeout_s=60.0)


def start_driver(modules: tuple[str, ...], path: str = "") -> tuple[subprocess.Popen[str], str, psutil.Process]:
    """Returns a driver with a fork server, the server's command for Ray, and the process of the server."""
    code = f"""
import psutil, subprocess, sys
sys.path.insert(0, {path!r})
from {ForkServer.__module__} import ForkServer
server = ForkServer({modules!r})
print(server.py_executable)
print(psutil.Process().children()[0].pid, flush=True)
for command in sys.stdin:
    subprocess.run([{raylet()!r}, "-c", command], stdout=subprocess.DEVNULL)
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    command = driver.stdout.readline().strip()
    return driver, command, psutil.Process(int(driver.stdout.readline()))


@pytest.mark.slow
def test_a_stopped_host_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    """A stopped process cannot notice that Ray has ended."""
    program = tmp_path / "survives.py"
    program.write_text(SURVIVES)
    driver, command, _ = start_driver(())
    with driver:
        assert driver.stdin is not None
        print(f"{command} {program} {tmp_path} host; exit", file=driver.stdin, flush=True)
        wait((tmp_path / "host").exists)
        host = psutil.Process(int((tmp_path / "host").read_text()))
        host.suspend()
        driver.kill()
    wait(lambda: not is_alive(host), timeout_s=10.0)


@pytest.mark.slow
def test_a_server_that_still_imports_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    slow = f"import pathlib, time\npathlib.Path({str(tmp_path / 'started')!r}).touch()\ntime.sleep(60)"
    (tmp_path / "imported_slowly.py").write_text(slow)
    driver, _, server = start_driver(("imported_slowly",), str(tmp_path))
    with driver:
        wait((tmp_path / "started").exists)
        driver.kill()
    wait(lambda: not is_alive(server), timeout_s=10.0)


@pytest.mark.slow
def test_a_client_that_starts_after_the_end_of_ray_starts_nothing(program: Path, tmp_path: Path) -> None:
    server = ForkServer()
    server.end()
    ended = subprocess.Popen(["true"])
    ended.wait()
    command = ["bash", "-c", f"exec {server.py_executable} {program} {tmp_path / 'facts'}"]
    environment = os.environ | {"RAY_RAYLET_PID": str(ended.pid)}
    assert subprocess.run(command, env=environment, timeout=200, check=False).returncode == 1
    assert not (tmp_path / "facts").exists()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def parent_processes(worker: Any) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def start_helper(worker: Any) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


@pytest.mark.slow
def test_hosts_and_their_replacements_are_forked(open_cluster: ClusterMaker, ray_session: None) -> None:
    cluster = open_cluster("ray", {"main": [2]}, {"judge": "main"}, num_threads=1)
    judge = cluster.group("judge", Scorer, 1)
    judge.load(2)
    (lost, server), (_, other) = judge.run(parent_processes)
    assert server == other and psutil.Process(server).ppid() == os.getpid()
    os.kill(lost, signal.SIGKILL)
    assert judge.score(Batch.from_columns({"x": [1, 2]})).get("score").tolist() == [3, 4]
    (process_id, forked_by), _ = judge.run(parent_processes)
    assert process_id != lost and forked_by == server


@pytest.mark.slow
def test_hosts_that_are_not_forked_are_replaced_too(open_cluster: ClusterMaker, ray_session: None) -> None:
    cluster = open_cluster("ray", {"main": [1]}, {"judge": "main"}, num_threads=1, fork_workers=False)
    judge = cluster.group("judge", Scorer, 1)
    judge.load(2)
    ((lost, starter),) = judge.run(parent_processes)
    assert psutil.Process(starter).name() == "raylet"
    os.kill(lost, signal.SIGKILL)
    assert judge.score(Batch.from_columns({"x": [1]})).get("score").tolist() == [3]


def test_child_processes_of_a_host_end_with_it(open_cluster: ClusterMaker, ray_session: None) -> None:
    cluster = open_cluster("ray", {"main": [1]}, {"judge": "main"}, num_threads=1)
    judge = cluster.group("judge", Scorer, 1)
    (helper,), ((lost, _),) = judge.run(start_helper), judge.run(parent_processes)
    os.kill(lost, signal.SIGKILL)
    wait(lambda: not psutil.pid_exists(helper))
