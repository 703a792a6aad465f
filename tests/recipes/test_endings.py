"""A driver leaves no process, shared memory or cluster resource behind, however it ends.

The programs are in tests/recipes/endings.py. Each runs in its own session, and signals go to all processes of the
session, as from a terminal.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from ray.util import placement_group_table

from flowrl.controller.backends.local_ray import LOOPBACK_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")

ROOT = Path(__file__).parents[2]
GONE_S = 60.0
"""Seconds after which no process of an ended driver may run."""
START_S = 200.0
"""Seconds to wait for a program's processes on a busy machine."""


def eventually(holds: Callable[[], object], within_s: float) -> None:
    """Waits until `holds()` is true, and fails after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"after {within_s:g} s it is still false"
        time.sleep(0.05)


def unused_segments() -> set[str]:
    """Returns the shared memory segments that no process has mapped. Concurrent tests keep theirs mapped.

    Ignores those of vLLM, which the programs of this file do not use. Other tests kill vLLM processes, which cannot
    remove theirs.
    """
    mapped = set[str]()
    for process_id in psutil.pids():
        with suppress(OSError):
            lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
            mapped |= {line.split(maxsplit=5)[4] for line in lines if "/dev/shm/" in line}
    segments = [segment for segment in os.scandir("/dev/shm") if not segment.name.startswith(("psm_", "vllm_"))]
    return {segment.name for segment in segments if str(segment.inode()) not in mapped}


class Program:
    """A Python program in its own session; an environment variable marks all its child processes."""

    def __init__(self, code: str, *arguments: str, folder: Path, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self._segments = unused_segments()
        self._printed = folder / f"printed-{self._mark}"
        with self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                cwd=ROOT,
                env=os.environ | {"FLOWRL_TEST_MARK": self._mark} | environment,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def printed(self) -> str:
        return self._printed.read_text()

    def signal_all(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def code(self, within_s: float = 60.0) -> int:
        """Returns the exit code; a negative one is the signal that ended the program."""
        return self.process.wait(within_s)

    def running(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_own(process)]

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            own = process.environ().get("FLOWRL_TEST_MARK") == self._mark
            return own and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def leaves_nothing(self) -> bool:
        eventually(lambda: not self.running(), GONE_S)
        eventually(lambda: not unused_segments() - self._segments, GONE_S)
        return True


StartRecipe = Callable[..., Program]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """An empty folder for the private folders of the programs. Its path is short, because it contains sockets."""
    folder = Path(tempfile.mkdtemp(prefix="fr", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_recipe(tmp_path: Path, ray_folder: Path) -> Iterator[StartRecipe]:
    """Starts a hundred steps of `SlowConfig` with overrides on a separate Ray."""
    started: list[Program] = []

    def start(*overrides: str) -> Program:
        config = tmp_path / "config.yaml"
        config.write_text(
            f"output: {tmp_path}/out\nsteps: 100\nthreads: 1\n"
            "placement: {device: cpu, pools: {main: [2]}, roles: {actor: main}}\n"
        )
        code = "import sys; from tests.recipes.endings import main; sys.exit(main(sys.argv[1:]))"
        started.append(
            Program(
                code,
                str(config),
                *overrides,
                folder=tmp_path,
                RAY_TMPDIR=str(ray_folder),
                TMPDIR=str(ray_folder),
                HOME=str(home),
            )
        )
        return started[-1]

    home = tmp_path / "home"
    home.mkdir()
    yield start
    for program in started:
        for process in program.running():
            process.kill()


def lines(folder: Path) -> int:
    path = folder / "out" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_recipe_leaves_complete_results(
    number: signal.Signals, code: int, start_recipe: StartRecipe, ray_folder: Path, tmp_path: Path
) -> None:
    program, out = start_recipe(), tmp_path / "out"
    eventually(lambda: lines(tmp_path) >= 2, START_S)
    if number is signal.SIGINT:
        program.signal_all(number)
    else:
        program.process.send_signal(number)
    assert program.code() == code and program.leaves_nothing()
    assert not list(ray_folder.iterdir()) and not (tmp_path / "home" / ".ray").exists()
    summary = json.loads((out / "summary.json").read_text())
    assert (
        summary["interrupted_by"] == number.name
        and 2 <= summary["steps"] == lines(tmp_path) < summary["steps_requested"] == 100
    )
    assert (out / "model" / "weights").read_text() == "complete"
    assert (out / "trace.json").is_file()
    assert f" step {summary['steps']} " in program.printed()
    assert program.printed().splitlines()[-1].endswith(f"after step {summary['steps']} of 100; results: {out}")


@pytest.mark.slow
def test_a_second_ctrl_c_aborts_a_recipe(start_recipe: StartRecipe, tmp_path: Path) -> None:
    program = start_recipe("steps=3000")
    eventually(lambda: lines(tmp_path) >= 2, START_S)
    program.signal_all(signal.SIGINT)
    eventually(lambda: "interrupt received" in program.printed(), GONE_S)
    time.sleep(0.4)  # an earlier signal would be a duplicate of the first
    program.signal_all(signal.SIGINT)
    assert program.code() == 130 and program.leaves_nothing()
    out = tmp_path / "out"
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    assert all(json.loads(line)["rows"] == 4 for line in (out / "metrics.jsonl").read_text().splitlines())
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


def names_of(processes: Iterable[psutil.Process]) -> list[str]:
    """Returns the names of the processes that have not ended."""
    names = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return names


STARTED = ("flowrl-", "gcs_server", "raylet", "RayHost")
"""Private folder and processes of a start, in their order."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("started", STARTED)
def test_a_signal_while_a_recipe_starts_leaves_no_folder(
    number: signal.Signals, started: str, start_recipe: StartRecipe, ray_folder: Path, tmp_path: Path
) -> None:
    program = start_recipe()

    def has_started() -> bool:
        names = [path.name for path in ray_folder.iterdir()] + names_of(program.running())
        return any(started in name for name in names)

    eventually(has_started, START_S)
    if number is signal.SIGINT:
        program.signal_all(number)
    else:
        program.process.send_signal(number)
    assert program.code() == 128 + number and program.leaves_nothing()
    assert not (tmp_path / "out").exists() and not list(ray_folder.iterdir())


@pytest.mark.slow
def test_a_killed_recipe_leaves_complete_lines_and_no_process(
    start_recipe: StartRecipe, ray_folder: Path, tmp_path: Path
) -> None:
    program = start_recipe()
    eventually(lambda: lines(tmp_path) >= 2, START_S)
    program.process.kill()
    assert program.code() == -signal.SIGKILL and program.leaves_nothing()
    (abandoned,) = ray_folder.iterdir()
    assert {path.name.split("-")[0] for path in abandoned.iterdir()} == {
        "exits",
        "fork",
        "process.json",
        "r",
        "t",
        "token",
    }
    next_program = "from flowrl.data.folders.private_folder import private_folder; private_folder()"
    assert Program(next_program, folder=tmp_path, RAY_TMPDIR=str(ray_folder), TMPDIR=str(ray_folder)).code() == 0
    assert not list(ray_folder.iterdir())
    metrics = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["rows"] == 4 for line in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("program_of_ray", ["raylet", "gcs_server"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_after_the_end_of_a_process_of_ray_a_recipe_restarts_or_ends(
    program_of_ray: str, restarts: int, start_recipe: StartRecipe, ray_folder: Path, tmp_path: Path
) -> None:
    program, out = start_recipe("steps=20", f"restarts={restarts}"), tmp_path / "out"
    eventually(lambda: lines(tmp_path) >= 2, START_S)
    next(each for each in psutil.Process(program.process.pid).children() if each.name() == program_of_ray).kill()
    assert program.code(START_S) == (0 if restarts else 1) and program.leaves_nothing()
    assert not list(ray_folder.glob("flowrl-*"))  # torch keeps its cache
    printed = " ".join(program.printed().split())  # a terminal may break the line of the report
    assert printed.count("SIGKILL") == 1 and re.findall(r"Ray's (\w+) [^(]*\(SIGKILL", printed) == [program_of_ray]
    assert (out / "trace.json").is_file()
    if restarts:
        summary = json.loads((out / "summary.json").read_text())
        assert (summary["restarts"], summary["steps"]) == (1, 20)


def hosts() -> list[str]:
    """Returns the worker processes on this session's Ray, including those without a CPU slot."""

    return [name for name in names_of(psutil.Process().children(recursive=True)) if "RayHost" in name]


def cluster_state() -> tuple[float, list[str], int]:
    """Returns the free CPUs, the placement groups and the number of workers of the session's Ray."""
    groups = [name for name, group in placement_group_table().items() if group["state"] != "REMOVED"]
    return ray.available_resources().get("CPU", 0), sorted(groups), len(hosts())


def stable_cluster_state() -> tuple[float, list[str], int]:
    """Waits until `cluster_state` does not change, because processes of earlier tests may still be ending."""
    snapshots: list[tuple[float, list[str], int]] = []

    def is_stable() -> bool:
        snapshots.append(cluster_state())
        time.sleep(1)
        return cluster_state() == snapshots[-1]

    eventually(is_stable, START_S)  # on a busy machine, Ray starts and ends idle workers slowly
    return snapshots[-1]


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param(None, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_a_joined_cluster_keeps_its_state_after_the_driver_ends(
    ending: signal.Signals | None, code: int, ray_session: None, tmp_path: Path
) -> None:
    before = stable_cluster_state()
    program = Program(
        "import sys; from flowrl.cli import exit_code; from tests.recipes.endings import drive;"
        "sys.exit(exit_code(lambda: drive(sys.argv[1], float(sys.argv[2]))))",
        *(ray.get_runtime_context().gcs_address, "0.1" if ending is None else "600"),
        folder=tmp_path,
        **{LOOPBACK_VARIABLE: "0"},
    )
    eventually(lambda: "holding" in program.printed(), 60)
    assert ending is None or cluster_state() != before
    if ending is signal.SIGKILL:
        program.process.kill()
    elif ending is not None:
        program.signal_all(ending)
    assert program.code() == code and program.leaves_nothing()
    eventually(lambda: cluster_state() == before, GONE_S)
    assert ray.get(ray.put(1)) == 1
