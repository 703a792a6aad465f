"""tests/run_gpu.sh on a machine without a GPU."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests/run_gpu.sh"
PARTS = ("first", "second", "vllm")
MAYBE_MISSING = ("datasets", "httpx", "hypothesis", "matplotlib", "ray", "tenacity", "tensorboard", "vllm")
"""Packages that a host with torch, transformers, peft, pytest and the wheels may lack."""

MARK = "pytest.mark." + "gpu"
MARKED = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text()
)
"""Files with a test that is marked gpu."""

UNUSABLE = [((), "RuntimeError: old driver"), (("torch",), "torch is missing")]
"""Missing packages, and the reason why torch cannot use a GPU."""


def run_script(folder: Path, part: str, python: str = sys.executable, device: str = "cuda") -> tuple[int, str]:
    """Returns the exit code and the results file of the script. It finds the programs in the folder first."""
    results = folder / "results.txt"
    path = f"{folder}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHON": python, "DEVICE": device, "CUDA_VISIBLE_DEVICES": "", "PATH": path}
    command = ["bash", str(SCRIPT), part, str(results), str(folder / "no_wheels")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    return done.returncode, results.read_text()


def interpreter(folder: Path, cases: str = "", *, missing: tuple[str, ...] = (), num_gpus: int = 1) -> str:
    """Returns the path of an interpreter that runs nothing, and writes its arguments to the file `calls`.

    `cases` are cases of a shell script for the arguments.
    """
    path = folder / "python"
    path.write_text(f"""#!/bin/sh
echo "$*" >>{folder}/calls
case "$*" in
*get_device_name*) [ {num_gpus} -gt 0 ] && echo GPU || {{ echo "RuntimeError: old driver" >&2; exit 1; }};;
*find_spec*) shift 2; for name; do case " {" ".join(missing)} " in *" $name "*) echo "$name";; esac; done;;
{cases}
esac
""")
    path.chmod(0o755)
    return str(path)


def interpreter_without(folder: Path, packages: tuple[str, ...]) -> str:
    """Returns the path of an interpreter that does not find the packages."""
    (folder / "sitecustomize.py").write_text(f"""
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {packages} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
""")
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def split_summary(results: str) -> tuple[str, list[str]]:
    """Returns the results before the summary, and the lines of the summary."""
    measured, summary = re.split(r"^== summary of .*\n", results, flags=re.MULTILINE)
    return measured, summary.splitlines()


@pytest.mark.parametrize("arguments", [(), ("first",), ("third", "results.txt"), ("", "results.txt")])
def test_a_wrong_call_writes_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "first|second|vllm RESULTS" in done.stderr and not done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="the machine has a GPU")
@pytest.mark.parametrize(("missing", "reason"), UNUSABLE)
def test_everything_is_skipped_without_a_gpu(tmp_path: Path, missing: tuple[str, ...], reason: str) -> None:
    code, results = run_script(tmp_path, "first", interpreter(tmp_path, missing=missing, num_gpus=0))
    (line,) = split_summary(results)[1]
    assert code == 0 and line.startswith("SKIPPED everything: ") and reason in line


@pytest.mark.parametrize(("missing", "reason"), UNUSABLE)
def test_the_script_fails_if_torch_cannot_use_the_gpu_that_the_driver_lists(
    tmp_path: Path, missing: tuple[str, ...], reason: str
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-0)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    code, results = run_script(tmp_path, "first", interpreter(tmp_path, missing=missing, num_gpus=0))
    (line,) = split_summary(results)[1]
    assert code == 1 and line.startswith("FAILED everything") and reason in line


def test_the_script_fails_if_there_is_a_gpu_and_nothing_runs(tmp_path: Path) -> None:
    code, results = run_script(tmp_path, "second", interpreter(tmp_path, missing=("transformers",)))
    assert code == 1
    assert split_summary(results)[1] == [
        "SKIPPED engines: missing: transformers",
        "SKIPPED tests marked gpu: missing: transformers",
        "SKIPPED learning: missing: transformers",
        "FAILED every program was skipped",
    ]


@pytest.mark.parametrize(
    ("part", "failing", "names"),
    [
        ("first", "memory", ["memory of two processes", "speed of training steps", "speed with compilation"]),
        ("second", "engines", ["engines", "tests marked gpu", "learning"]),
        ("vllm", "vllm", ["GRPO with vLLM", "tests of vLLM marked gpu"]),
    ],
)
def test_a_failed_program_does_not_prevent_later_ones(
    tmp_path: Path, part: str, failing: str, names: list[str]
) -> None:
    code, results = run_script(tmp_path, part, interpreter(tmp_path, f'*benchmarks.gpu*" {failing}") exit 3;;'))
    measured, summary = split_summary(results)
    assert code == 1
    assert re.findall("^== (.*)", measured, re.MULTILINE) == names
    assert summary == [f"FAILED {names[0]}: exit code 3"]


def test_the_summary_repeats_figures_and_ends_with_failures(tmp_path: Path) -> None:
    cases = """*" memory") echo "FAILED cell: broken"; echo "* other cell: 2 GB"; echo detail; exit 1;;
*" mfu") echo "* third cell: 3 ms"; echo "SKIPPED last cell: no time";;"""
    code, results = run_script(tmp_path, "first", interpreter(tmp_path, cases))
    assert code == 1
    assert split_summary(results)[1] == [
        "* other cell: 2 GB",
        "* third cell: 3 ms",
        "SKIPPED last cell: no time",
        "FAILED cell: broken",
        "FAILED memory of two processes: exit code 1",
    ]


def test_missing_packages_skip_only_the_programs_that_need_them(tmp_path: Path) -> None:
    code, results = run_script(tmp_path, "second", interpreter(tmp_path, missing=("pytest",)))
    assert (code, split_summary(results)[1]) == (0, ["SKIPPED tests marked gpu: missing: pytest"])


@pytest.mark.parametrize(("part", "is_vllm"), [("second", False), ("vllm", True)])
def test_every_file_with_a_test_marked_gpu_runs_with_the_markers_of_the_project(
    tmp_path: Path, part: str, is_vllm: bool
) -> None:
    run_script(tmp_path, part, interpreter(tmp_path, f'*tomllib*) exec {sys.executable} "$@";;'))
    (call,) = re.findall(r"^-m pytest (?:.*\n)+?.*--rootdir.*", (tmp_path / "calls").read_text(), re.MULTILINE)
    paths = [path for path in MARKED if ("/vllm/" in path) == is_vllm]
    assert paths and [word for word in call.split() if word.endswith(".py")] == paths
    assert re.search(r"markers=slow: .*\ngpu: .*\nvllm: ", call)


def test_each_program_receives_the_time_at_which_it_is_ended(tmp_path: Path) -> None:
    start_s = time.time()
    run_script(tmp_path, "first", interpreter(tmp_path))
    calls = re.findall(r"benchmarks\.gpu .*--end (\d+) (\w+)", (tmp_path / "calls").read_text())
    assert [cells for _, cells in calls] == ["memory", "mfu", "compile"]
    ends_s = [int(end) - start_s for end, _ in calls]
    assert 0 < ends_s[0] < ends_s[1] < ends_s[2] <= 240


@pytest.mark.slow
def test_tests_marked_gpu_load_without_missing_packages(tmp_path: Path) -> None:
    python = interpreter_without(tmp_path, MAYBE_MISSING)
    options = "-m pytest -c /dev/null --rootdir . -q -m gpu --collect-only -p no:cacheprovider --import-mode importlib"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    paths = [path for path in MARKED if "/vllm/" not in path]
    command = [python, *options.split(), *paths]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert paths and done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["first", "second"])
def test_a_rehearsal_on_the_cpu_needs_no_missing_package(tmp_path: Path, part: str) -> None:
    code, results = run_script(tmp_path, part, interpreter_without(tmp_path, MAYBE_MISSING), device="cpu")
    measured, summary = split_summary(results)
    assert code == 0, results
    assert len(re.findall("^== ", measured, re.MULTILINE)) == {"first": 3, "second": 3}[part]
    assert len([line for line in summary if line.startswith("* ")]) == {"first": 16, "second": 7}[part]
    assert "Warning" not in results


@pytest.mark.slow
def test_a_program_fails_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "memory", "--folder", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(re.findall("^FAILED", done.stdout, re.MULTILINE)) == 3
