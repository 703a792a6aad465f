"""Counts the files of flowrl/ that one training step executes, over all processes.

    python -m tests.benchmarks.files_per_step [--checkout FOLDER] [--schedules sync async] [key=value ...]

Runs GRPO for five steps on the quickstart's task with two rollout replicas and one trainer, under `sync` and under
`async`. Every process records the files of flowrl/ in which a function is called between two events: the training loop
requests the batch of step 3 (which draws its prompts under `sync`), and a rollout commits weights of version 3.

`--checkout` measures another checkout of the repository, with its own names of settings given as key=value.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.benchmarks.measure import read_arguments

ROOT = Path(__file__).parents[2]
STEP = 3

# Loaded by every Python process of the run, before any other code.
TRACER = """
import mmap, os, sys, threading

folder, package = os.environ["FILES_PER_STEP"].split(":")
with open(os.path.join(folder, "window"), "r+b") as file:
    window = mmap.mmap(file.fileno(), 1)
seen = set()

def record(frame, event, argument):
    if event != "call":
        return
    code = frame.f_code
    path = code.co_filename
    if not path.startswith(package):
        return
    name = code.co_qualname
    if name.endswith((".batch", ".next_batch")) and frame.f_locals.get("step") == STEP and window[0] == 0:
        window[0] = 1
    if window[0] == 1 and (os.getpid(), path) not in seen:
        seen.add((os.getpid(), path))
        with open(os.path.join(folder, f"files-{os.getpid()}"), "a") as file:
            file.write(path + "\\n")
    if name.endswith(".commit") and "/engines/" in path and window[0] == 1:
        owner = frame.f_locals.get("self")
        if getattr(owner, "_next_version", 0) >= STEP:
            window[0] = 2

threading.setprofile(record)
sys.setprofile(record)
"""


def files_of(checkout: Path, schedule: str, settings: list[str], folder: Path) -> Counter[str]:
    """Runs five steps; returns each file's number of processes."""
    (folder / "window").write_bytes(b"\0")
    (folder / "sitecustomize.py").write_text(TRACER.replace("== STEP", f"== {STEP}").replace(">= STEP", f">= {STEP}"))
    data = folder / "data"
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    make_data = [sys.executable, "-m", "recipes.quickstart.prepare", "--output", str(data), "--seed", "0"]
    subprocess.run(make_data, cwd=checkout, env=environment, check=True)
    command = [
        sys.executable,
        "-m",
        "recipes.grpo.train",
        "recipes/grpo/arithmetic.yaml",
        "placement=placement/detached_2m1t.yaml",
        "placement.device=cpu",
        f"schedule.kind={schedule}",
        f"output={folder / 'run'}",
        "steps=5",
        "evaluate_every=0",
        f"actor.model.path={data / 'model'}",
        f"data.train={data / 'train.jsonl'}",
        f"data.test={data / 'test.jsonl'}",
        *settings,
    ]
    environment |= {
        "PYTHONPATH": f"{folder}{os.pathsep}{checkout}",
        "FILES_PER_STEP": f"{folder}:{checkout / 'flowrl'}{os.sep}",
    }
    subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert (folder / "window").read_bytes() == b"\2", "no rollout committed the weights of the step"
    lines = [line for part in folder.glob("files-*") for line in part.read_text().splitlines()]
    return Counter(Path(line).relative_to(checkout).as_posix() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("settings", nargs="*", default=["batch_size=64", "minibatch_size=32"])
    parser.add_argument("--schedules", nargs="+", default=["sync", "async"], choices=["sync", "async"])
    arguments = read_arguments(parser, schedules=["sync"])
    for schedule in arguments.schedules:
        with tempfile.TemporaryDirectory() as folder:
            files = files_of(arguments.checkout.absolute(), schedule, arguments.settings, Path(folder))
        sys.stdout.write(f"{schedule}: {len(files)} files in a step\n")
        for name, num_processes in sorted(files.items()):
            sys.stdout.write(f"  {name} ({num_processes} processes)\n")


if __name__ == "__main__":
    main()
