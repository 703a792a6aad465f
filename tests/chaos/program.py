"""A training program as a child process: its output with times, its processes, its progress and its leftovers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.workers import FOLDER

ROOT = Path(__file__).parents[2]
GONE_S = 10.0
"""Seconds after the end of a program in which its processes must end."""

CACHES = {"torchinductor_root", "torchinductor_" + os.environ.get("USER", "root")}
"""Caches of torch in the temporary folder, which later programs of the user share."""


class Program:
    """A training program that writes temporary files to `folder/t`. The environment of all its processes, also of those
    that score, has this folder as `TMPDIR`.
    """

    def __init__(self, folder: Path, config: Path, module: str = "tests.chaos.training") -> None:
        self.folder = folder
        self.temporary = folder / "t"
        self.temporary.mkdir(exist_ok=True)
        shutil.rmtree(folder / "now", ignore_errors=True)
        (folder / "now").mkdir()
        self.lines: list[tuple[float, str]] = []
        """Monotonic time and text of each line of the output."""
        self.started_s = time.monotonic()
        temporary = {"TMPDIR": str(self.temporary), "RAY_TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(config)],
            cwd=ROOT,
            env=os.environ | {FOLDER: str(folder), "COLUMNS": "4000", "PYTHONPATH": str(ROOT)} | temporary,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with (self.folder / "output.log").open("a", buffering=1) as log, self.process.stdout as output:
            for line in output:
                self.lines.append((time.monotonic(), line.rstrip()))
                log.write(f"{time.monotonic():.2f} {line}")

    @property
    def code(self) -> int | None:
        """Exit code; None while the program runs. A negative code is the signal that ended the program."""
        return self.process.poll()

    def output_since(self, event_s: float) -> list[tuple[float, str]]:
        """Returns the lines after a monotonic time, with their times."""
        return [line for line in list(self.lines) if line[0] >= event_s]

    def current_methods(self) -> dict[tuple[str, int], tuple[int, str]]:
        """Returns (role, rank) -> (process id, method)."""
        current = {}
        for path in (self.folder / "now").iterdir():
            with suppress(ValueError, OSError):
                process_id, method, _ = path.read_text().split()
                role, _, rank = path.name.rpartition("-")
                current[role, int(rank)] = int(process_id), method
        return current

    def processes(self) -> list[psutil.Process]:
        """Returns all processes of the program, also those of other sessions, without zombies."""
        return processes_in(self.temporary)

    def scoring_processes(self, worker: int) -> list[int]:
        """Returns the ids of the processes in which a worker runs reward functions or environments.

        The worker starts a launcher, which starts a guard for each process.
        """
        with suppress(psutil.Error):
            launchers = psutil.Process(worker).children()
            guards = [guard for launcher in launchers for guard in launcher.children()]
            return [process.pid for guard in guards for process in guard.children()]
        return []

    def ray_process(self, name: str) -> int:
        """Returns the id of a process of the program's Ray, which the driver has started."""
        return next(child.pid for child in psutil.Process(self.process.pid).children() if child.name() == name)

    def wait_for_end(self) -> list[str]:
        """Waits for the end of all processes; ends those that remain, and returns their names."""
        self.process.wait()
        self._reader.join(timeout=GONE_S)
        return end_processes_in(self.temporary)

    def temporary_entries(self) -> set[str]:
        return temporary_entries(self.temporary)

    def remove_temporary_entries(self) -> None:
        for path in self.temporary.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def kill(self) -> None:
        """Ends all processes of the program."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait_for_end()


def processes_in(temporary: Path) -> list[psutil.Process]:
    """Returns all processes whose folder of temporary files is `temporary`, or in it, without zombies."""
    own = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_marked = Path(process.environ().get("TMPDIR", "/")).is_relative_to(temporary)
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                own.append(process)
    return own


def end_processes_in(temporary: Path) -> list[str]:
    """Waits for the end of all processes of a program; ends those that remain, and returns their names."""
    deadline = time.monotonic() + GONE_S
    while (left := processes_in(temporary)) and time.monotonic() < deadline:
        time.sleep(0.3)
    names = []
    for process in left:
        with suppress(psutil.Error):
            names.append(f"process {process.name()}")
            process.kill()
    return names


def temporary_entries(temporary: Path) -> set[str]:
    """Returns the temporary files and folders of a program, and the session folders of Ray."""
    entries = {path.name for path in temporary.iterdir()} - CACHES - {"ray"}
    ray = temporary / "ray"
    return entries | {f"ray/{path.name}" for path in (ray.iterdir() if ray.exists() else ()) if not path.is_symlink()}


def last_step(output: Path) -> int:
    """Returns the step of the last complete log record; -1 without records."""
    path = output / "metrics.jsonl"
    if not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        complete = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    return int(json.loads(complete)["step"]) if complete else -1
