"""recipes/cluster/run_multinode.sh: two hosts on this machine, each with an address of the loopback network.

A shell without this one's environment stands in for ssh; a host whose name starts with `off` cannot be reached.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flowrl.cli import run_recipe
from flowrl.config import Placement, to_yaml
from recipes.cluster.multinode import main
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train
from tests.errors import missing_facts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a machine has one loopback address elsewhere")

SSH = """#!/bin/sh
host=$1
shift
case $host in off*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255;; esac
exec env -i HOME="$HOME" PATH="$PATH" sh -c "$*"
"""
ROLES = ("actor", "critic", "reference", "reward", "rollout")


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    monkeypatch.setenv("FLOWRL_SSH", str(path))


@pytest.fixture
def hostfile(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        path = tmp_path / "hosts"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


@pytest.mark.timeout(600)
def test_ppo_trains_on_two_hosts(
    ssh: None, hostfile: Callable[..., Path], ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    placement = Placement(device="cpu", pools={"main": [1, 1]}, roles=dict.fromkeys(ROLES, "main"))
    config = ppo_config(recipe="recipes.ppo.config:PPOConfig", backend="ray", placement=placement)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    hosts = hostfile("# two of them", "127.0.0.2", "", "127.0.0.3  # the other")
    command = [
        "recipes/cluster/run_multinode.sh",
        str(hosts),
        "python",
        "-m",
        "recipes.ppo.train",
        str(file),
        "steps=1",
    ]
    environment = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", *command], env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"2 nodes at 127\.0\.0\.2:\d+: 127\.0\.0\.2, 127\.0\.0\.3", done.stderr)
    trace = json.loads((config.output / "trace.json").read_text())
    updates = [event["args"] for event in trace["traceEvents"] if event["name"] == "update" and "args" in event]
    assert {event["node"] for event in updates} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_all_nodes_end_with_the_driver_and_no_command_line_contains_the_token(
    ending: signal.Signals, code: int, ssh: None, hostfile: Callable[..., Path]
) -> None:
    hosts = str(hostfile("127.0.0.2", "127.0.0.3"))
    command = [sys.executable, "-m", "recipes.cluster.multinode", hosts, sys.executable, "-m", "tests.recipes.on_hosts"]
    with subprocess.Popen([*command, "x=1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        line = launcher.stdout.readline()
        assert line, launcher.stderr.read()
        facts = json.loads(line)
        started = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(ending)
        assert launcher.wait(60) == code
        if ending == signal.SIGKILL:  # a killed process does not forward signals
            os.kill(facts["process"], signal.SIGINT)
        _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == [] and facts["num_raylets"] == 2
    assert facts["arguments"][:2] == ["x=1", "--address"] and not facts["token_is_seen"]


@pytest.mark.slow
def test_an_unreachable_host_is_a_one_line_error_and_ends_the_others(
    ssh: None, hostfile: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children(recursive=True)
    assert main([str(hostfile("127.0.0.2", "off-1")), "true"]) == 2
    message = capsys.readouterr().err
    assert "off-1" in message and "Connection refused" in message and message.count("\n") == 1
    started = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert psutil.wait_procs(started, timeout=60)[1] == []


@pytest.mark.slow
def test_the_logs_of_a_killed_program_are_deleted_by_the_next_one(hostfile: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "recipes.cluster.multinode", str(hostfile("127.0.0.2")), "true"]
    with tempfile.TemporaryDirectory(prefix="fm", dir="/tmp") as folder:
        parent = Path(folder)
        # A connection that starts nothing and stays open, and one that ends at once.
        open_, closed = (
            os.environ | {"TMPDIR": folder, "RAY_TMPDIR": folder, "FLOWRL_SSH": f"sh -c {program}"}
            for program in ("cat", "false")
        )
        with subprocess.Popen(command, env=open_) as launcher:
            while not (logs := list(parent.rglob("0.log"))):
                assert launcher.poll() is None
                time.sleep(0.05)
            launcher.kill()
        assert logs[0].exists()
        assert subprocess.run(command, env=closed, capture_output=True, check=False).returncode == 2
        assert not list(parent.iterdir())


@pytest.mark.parametrize(
    ("lines", "location"),
    [
        ((), "hosts"),
        (("# none",), "hosts"),
        (("a", "b slots=8"), "hosts:2: 'b slots=8'"),
        (("-oProxyCommand=x",), "hosts:1: '-oProxyCommand=x'"),
        (("a", "a"), "hosts:2: duplicate host a"),
    ],
)
def test_a_wrong_hostfile_is_a_one_line_error(
    lines: tuple[str, ...], location: str, hostfile: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(hostfile(*lines)), "true"]) == 2
    printed = capsys.readouterr().err
    assert location in printed and printed.count("\n") == 1


def test_a_missing_hostfile_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "true"]) == 2
    assert not missing_facts(capsys.readouterr().err, tmp_path / "none")
    assert main([str(tmp_path / "none")]) == 2
    assert not missing_facts(capsys.readouterr().err, "run_multinode.sh", "HOSTFILE", "COMMAND")


@pytest.mark.parametrize("where", [0, 2])
def test_the_option_address_is_the_setting_address(
    where: int, ppo_config: Callable[..., PPOConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(ppo_config(recipe="recipes.ppo.config:PPOConfig", backend="ray")))
    argv = [str(file), "steps=1"]
    argv[where:where] = ["--address", "127.0.0.1:1"]
    assert run_recipe(PPOConfig, train, argv) == 2
    assert not missing_facts(capsys.readouterr().err, "address", "127.0.0.1:1")
    assert run_recipe(PPOConfig, train, [*argv, "backend=inline"]) == 2
    assert not missing_facts(capsys.readouterr().err, "address", "backend", "inline")
