"""tests/run_gpu.sh and the GPU benchmark on a machine without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests/run_gpu.sh"
MAYBE_MISSING = (
    "accelerate",
    "httpx",
    "hypothesis",
    "matplotlib",
    "peft",
    "psutil",
    "pytest",
    "ray",
    "rich",
    "tenacity",
    "tensorboard",
)
"""Packages that a GPU host may lack."""


def run_script(folder: Path, python: str = sys.executable, device: str = "cuda") -> tuple[int, str]:
    """Returns the exit code and the results file of the script."""
    results = folder / "results.txt"
    environment = os.environ | {"PYTHON": python, "DEVICE": device, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(SCRIPT), str(folder / "no_wheels"), str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    return done.returncode, results.read_text()


def interpreter(folder: Path, cases: str) -> str:
    """Returns the path of an interpreter that sees a GPU and treats its arguments by the cases of a shell script."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\ncase "$*" in\n*get_device_name*|"-c import torch") echo GPU;;\n{cases}\nesac\n')
    path.chmod(0o755)
    return str(path)


MARKED = [
    path
    for path in (ROOT / "tests").rglob("test_*.py")
    for _ in re.findall(r"^@pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
]
"""Path of every test function that is marked gpu."""


def num_not_run(results: str) -> tuple[int, int]:
    """Returns the number of gpu tests that did not run, and the sum over the reasons, from the last line."""
    total, *counts = map(int, re.findall(r"(?<=run: )\d+|(?<=; )\d+(?=: )", results.splitlines()[-1]))
    return total, sum(counts)


def interpreter_without(folder: Path, packages: tuple[str, ...]) -> str:
    """Returns the path of an interpreter that does not find the packages, except a copy of psutil within Ray."""
    (folder / "sitecustomize.py").write_text(f"""
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        is_missing = name in {packages} and spec is not None and "thirdparty_files" not in str(spec.origin)
        return None if is_missing else spec

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
""")
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_everything_is_skipped_without_a_gpu(tmp_path: Path) -> None:
    code, results = run_script(tmp_path)
    assert code == 0
    assert "SKIPPED everything: no GPU" in results
    assert num_not_run(results) == (len(MARKED), len(MARKED))


def test_the_script_fails_if_there_is_a_gpu_and_nothing_runs(tmp_path: Path) -> None:
    code, results = run_script(tmp_path, interpreter(tmp_path, "*) exit 1;;"))
    assert code == 1
    assert "== " not in results and "transformers is missing" in results


def test_the_script_runs_every_part_and_fails_if_one_fails(tmp_path: Path) -> None:
    code, results = run_script(tmp_path, interpreter(tmp_path, "*tests.benchmarks.gpu*) exit 3;;"))
    assert code == 1
    assert re.findall("^FAILED.*", results, re.MULTILINE) == ["FAILED checks and benchmarks (exit code 3)"]
    assert len(re.findall("^== ", results, re.MULTILINE)) == len(re.findall('^run "', SCRIPT.read_text(), re.MULTILINE))


def test_missing_packages_skip_only_the_parts_that_need_them(tmp_path: Path) -> None:
    cases = "\n".join(f'"-c import {name}") exit 1;;' for name in MAYBE_MISSING)
    code, results = run_script(tmp_path, interpreter(tmp_path, cases))
    assert code == 0
    assert re.findall("^== .*", results, re.MULTILINE) == ["== checks and benchmarks"]
    assert results.count("SKIPPED ") == 6
    assert num_not_run(results) == (len(MARKED), len(MARKED))


@pytest.mark.slow
def test_tests_marked_gpu_load_without_hypothesis_and_psutil(tmp_path: Path) -> None:
    python = interpreter_without(tmp_path, ("hypothesis", "psutil"))
    options = "-m pytest -c /dev/null --rootdir . -q -m gpu --collect-only -p no:cacheprovider --import-mode importlib"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    paths = sorted({str(path) for path in MARKED if "vllm" not in str(path)})
    command = [python, *options.split(), *paths]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert paths and done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_rehearsal_on_the_cpu_runs_ppo_without_packages_that_the_wheels_lack(tmp_path: Path) -> None:
    missing = tuple({*MAYBE_MISSING, "vllm"} - {"ray", "rich"})
    code, results = run_script(tmp_path, interpreter_without(tmp_path, missing), device="cpu")
    assert code == 0, results
    assert re.findall("^== .*", results, re.MULTILINE) == ["== checks and benchmarks", "== PPO with Ray"]
    assert num_not_run(results) == (len(MARKED), len(MARKED))


def test_the_script_runs_every_file_with_a_test_marked_gpu() -> None:
    paths = tuple(re.findall(r"tests/engines/\S+", SCRIPT.read_text()))
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^\s*@?pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    ]
    assert marked and [path for path in marked if not path.startswith(paths)] == []


@pytest.mark.parametrize("path", sorted(set(re.findall(r"tests/engines/\S+", SCRIPT.read_text()))))
def test_the_paths_of_the_script_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.slow
def test_the_benchmark_needs_no_package_that_a_host_may_lack() -> None:
    code = f"""
import runpy, sys
sys.modules |= dict.fromkeys({MAYBE_MISSING}, None)
sys.argv[1:] = ["--device", "cpu", "--tiny"]
runpy.run_module("tests.benchmarks.gpu", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_benchmark_fails_if_a_measurement_fails() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--device", "cuda:0", "--tiny"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
