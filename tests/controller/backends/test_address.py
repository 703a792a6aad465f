"""Access to an existing Ray cluster and to the Ray of a local run, and the addresses where processes listen."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray

from flowrl import Cluster, Placement
from flowrl.controller.backends.local_ray import LOOPBACK_VARIABLE
from flowrl.controller.backends.ray_nodes import check_cluster
from flowrl.controller.errors import BackendError
from tests.errors import missing_facts, rejects


@pytest.mark.slow
def test_a_driver_joins_a_cluster_by_its_address_and_does_not_stop_it(ray_session: None) -> None:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.controller.joining_driver", address]
    environment = os.environ | {LOOPBACK_VARIABLE: "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    process, weights = done.stdout.splitlines()
    assert not missing_facts(process, "placement.pools.main", 2)
    assert weights == "[7, 11, 9]"
    assert ray.get(ray.put(1)) == 1


def test_an_unreachable_address_is_rejected() -> None:
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"actor": "main"})
    with rejects("address", "127.0.0.1:1", error=BackendError):
        Cluster(placement, address="127.0.0.1:1")


@pytest.mark.parametrize("address", ["10.0.0.5", ":6379", "ray://10.0.0.5:10001"])
def test_an_address_without_host_or_port_is_rejected(address: str) -> None:
    with rejects("address", "HOST", "PORT", "auto", error=BackendError) as caught:
        check_cluster(address)
    assert address in str(caught.value)


def test_a_web_server_at_the_address_is_rejected() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with rejects(f"127.0.0.1:{server.server_port}", "UNAVAILABLE", error=BackendError):
            check_cluster(f"127.0.0.1:{server.server_port}")
        server.shutdown()


def test_another_grpc_server_at_the_address_is_rejected() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with rejects(f"127.0.0.1:{port}", "UNIMPLEMENTED", error=BackendError):
            check_cluster(f"127.0.0.1:{port}")
    finally:
        server.stop(grace=None).wait()


def test_a_program_that_does_not_respond_is_rejected_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with rejects(address, "0.2", error=BackendError):
            check_cluster(address, timeout_s=0.2)


@dataclass
class LocalRun:
    """The run of local_run.py, the tokens of its user and of its Ray, and the facts that it prints."""

    user_token: str
    token: str
    home: Path
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    user_token, home, pipe = secrets.token_hex(32), tmp_path_factory.mktemp("home"), subprocess.PIPE
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_TOKEN": user_token, "HOME": str(home)}
    command = [sys.executable, "-m", "tests.controller.local_run"]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()[-3000:]
        facts = json.loads(line)
        yield LocalRun(user_token, (Path(facts["folder"]) / "token").read_text(), home, facts)
        process.communicate(timeout=60)


ENTER = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.get(ray.put('inside')))"
JOIN = """
import json, os, sys, time
from flowrl.cli import exit_code
from flowrl.controller.backends.local_ray import set_authentication
from flowrl.controller.backends.ray_nodes import RayNodes
for variables in json.loads(os.environ["CASES"]):
    set_authentication(variables)
    started = time.monotonic()
    code = exit_code(lambda: RayNodes(sys.argv[1]))
    print(json.dumps([code, time.monotonic() - started]))
"""
WRONG_TOKEN = "0" * 64
NODE = f"""
import os, sys
os.environ["{LOOPBACK_VARIABLE}"] = "1"  # with 0, `ray start` rejects to join
from ray._private import services
from ray.scripts.scripts import main
services.resolve_ip_for_localhost = str  # keeps 127.0.0.1
sys.argv[1:] = ["start", "--address", sys.argv[1], "--node-ip-address", "127.0.0.1"]
main()
"""


def outsider(code: str, run: LocalRun, home: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs a process that knows the address and has the environment `variables`."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "RAY_NUM_REDIS_GET_RETRIES": "1"}
    environment |= {LOOPBACK_VARIABLE: "0"} | variables
    command = [sys.executable, "-c", code, run.facts["address"]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


NO_TOKEN: dict[str, str] = {}
OFF = {"RAY_AUTH_MODE": "disabled"}
ANOTHER_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": WRONG_TOKEN}


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        pytest.param(ENTER, NO_TOKEN, marks=pytest.mark.slow, id="a driver-no token"),
        pytest.param(NODE, NO_TOKEN, marks=pytest.mark.slow, id="a node-no token"),
        pytest.param(ENTER, OFF, marks=pytest.mark.slow, id="a driver-authentication off"),
        pytest.param(NODE, OFF, marks=pytest.mark.slow, id="a node-authentication off"),
        pytest.param(ENTER, ANOTHER_TOKEN, marks=pytest.mark.slow, id="a driver-wrong token"),
        pytest.param(NODE, ANOTHER_TOKEN, marks=pytest.mark.slow, id="a node-wrong token"),
    ],
)
def test_a_process_without_the_token_cannot_join_a_local_run(
    code: str, variables: dict[str, str], local_run: LocalRun, tmp_path: Path
) -> None:
    process = outsider(code, local_run, tmp_path, **variables)
    assert process.returncode != 0
    assert "AuthenticationError" in process.stderr + process.stdout


def test_a_process_with_the_token_can_join(local_run: LocalRun, tmp_path: Path) -> None:
    let_in = outsider(ENTER, local_run, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=local_run.token)
    assert let_in.stdout == "inside\n", let_in.stderr[-2000:]


def test_a_local_run_has_its_own_token_and_writes_none_to_the_home_folder(local_run: LocalRun) -> None:
    assert len(local_run.token) == 64 and local_run.token != local_run.user_token
    assert not (local_run.home / ".ray").exists()


def test_a_driver_without_the_token_ends_with_one_line_and_exit_code_2_at_once(
    local_run: LocalRun, tmp_path: Path
) -> None:
    no_file = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/no/such/file"}
    process = outsider(JOIN, local_run, tmp_path, CASES=json.dumps([NO_TOKEN, ANOTHER_TOKEN, no_file]))
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert [code for code, _ in results] == [2, 2, 2], process.stderr
    assert max(elapsed_s for _, elapsed_s in results) < 5
    none, other, unreadable = process.stderr.splitlines()  # no line of Ray
    assert not missing_facts(none, local_run.facts["address"], "RAY_AUTH_MODE", "token", "RAY_AUTH_TOKEN_PATH")
    assert not missing_facts(other, local_run.facts["address"], "rejects", "RAY_AUTH_TOKEN_PATH")
    assert not missing_facts(unreadable, "RAY_AUTH_MODE", "/no/such/file", "RAY_AUTH_TOKEN_PATH")


def test_a_local_run_has_no_dashboard(local_run: LocalRun) -> None:
    assert local_run.facts["dashboard"] == ""


def test_all_processes_of_a_local_run_listen_on_the_loopback_interface_only(local_run: LocalRun) -> None:
    listening = local_run.facts["listening"]
    assert {"gcs_server", "raylet", "ray::_RayHost"} <= {name for name, _ in listening}
    assert [(name, ip) for name, ip in listening if ip not in ("127.0.0.1", "::ffff:127.0.0.1")] == []
    assert local_run.facts["address"].startswith("127.0.0.1:")


def test_flowrl_sockets_listen_on_loopback_in_a_local_run(local_run: LocalRun) -> None:
    """Ports that open with the process group belong to flowrl; those open before belong to Ray."""
    before, after = (local_run.facts[when] for when in ("before", "after"))
    assert local_run.facts["total"] == [3, 3]
    ours = [[ip for ip, port in now if [ip, port] not in was] for was, now in zip(before, after, strict=True)]
    # The store of the first rank, and on each rank a listener of gloo for the pool and one for the role.
    assert [len(addresses) for addresses in ours] == [3, 2]
    assert {ip for addresses in ours for ip in addresses} == {"127.0.0.1"}
