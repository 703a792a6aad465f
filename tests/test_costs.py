"""The cost of a test, and sessions that fail because of a default test."""

import pytest

from tests.costs import LISTED, MAX_LISTED, Clocks
from tests.errors import missing_facts
from tests.selection import TESTS

pytest_plugins = ["pytester"]

PLUGIN = """
import pytest
from tests.costs import Costs

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: as in pyproject.toml")
    config.pluginmanager.register(Costs(0.05, {listed!r}, "test_gcs_server"), "costs")
"""

EXPENSIVE = """
import time
import pytest

def compute():
    start = time.process_time()
    while time.process_time() < start + 0.5:
        sum(range(100_000))

@pytest.fixture(scope="module")
def shared():
    compute()

def test_cheap(shared):
    pass

def test_expensive():
    compute()

@pytest.mark.slow
def test_slow():
    compute()
"""

COMPUTES_ONCE = """
import time

computed = []

def test_computes_once():
    start = time.process_time()
    while not computed and time.process_time() < start + 0.5:
        sum(range(100_000))
    computed.append(True)
"""

STARTS_RAY = """
import shutil, subprocess, time
import pytest

@pytest.fixture(scope="module")
def cluster(tmp_path_factory, request):
    program = shutil.copy(shutil.which("sleep"), tmp_path_factory.mktemp("ray") / "test_gcs_server")
    costs = request.config.pluginmanager.getplugin("costs")
    with subprocess.Popen([program, "600"]) as process:
        deadline = time.monotonic() + 120
        while not costs.ray_starts() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield
        process.kill()

def test_with_a_cluster(cluster):
    pass
"""


@pytest.mark.parametrize(
    ("spent", "slowdown", "expected"),
    [
        (Clocks(wall=3.0, cpu=0.5, waiting=0.0), 1.0, 3.0),  # sleeps on an idle machine
        (Clocks(wall=3.0, cpu=0.5, waiting=2.0), 1.0, 1.0),  # waits for a core, as far as the machine can measure it
        (Clocks(wall=1.0, cpu=1.75, waiting=0.0), 1.0, 1.75),  # computes in several processes
        (Clocks(wall=3.0, cpu=2.0, waiting=0.5), 2.0, 1.25),  # computes on a slow machine, also in other processes
    ],
)
def test_the_cost_is_corrected_cpu_time_and_wall_time_without_waiting(
    spent: Clocks, slowdown: float, expected: float
) -> None:
    assert spent.cost(slowdown) == expected


def test_few_tests_are_listed_and_each_has_a_reason_and_a_file() -> None:
    assert len(LISTED) <= MAX_LISTED
    assert all(reason for reason in LISTED.values())
    assert [name for name in LISTED if not (TESTS.parent / name.split("::")[0]).exists()] == []


def run(pytester: pytest.Pytester, source: str, *listed: str, options: tuple[str, ...] = ()) -> pytest.RunResult:
    """Runs the tests of `source` as test_it.py in a session of its own."""
    pytester.makeconftest(PLUGIN.format(listed=dict.fromkeys(listed, "a reason")))
    pytester.makepyfile(test_it=source)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


def errors(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if line.startswith("ERROR ")]


def test_an_expensive_default_test_fails_the_session(pytester: pytest.Pytester) -> None:
    result = run(pytester, EXPENSIVE)
    (error,) = errors(result)
    assert result.ret == pytest.ExitCode.TESTS_FAILED and "test_it.py::test_expensive" in error
    assert not missing_facts(error, "0.1", "slow", "LISTED", "tests/costs.py")


def test_a_test_whose_repetition_is_cheap_does_not_fail_the_session(pytester: pytest.Pytester) -> None:
    result = run(pytester, COMPUTES_ONCE)
    result.assert_outcomes(passed=1)
    assert (result.ret, errors(result)) == (pytest.ExitCode.OK, [])


def test_a_listed_test_may_be_expensive(pytester: pytest.Pytester) -> None:
    result = run(pytester, EXPENSIVE, "test_it.py::test_expensive")
    assert (result.ret, errors(result)) == (pytest.ExitCode.OK, [])


def test_a_session_of_given_paths_only_reports_costs(pytester: pytest.Pytester) -> None:
    result = run(pytester, EXPENSIVE, options=("test_it.py",))
    assert (result.ret, errors(result)) == (pytest.ExitCode.OK, [])
    assert any(line.endswith(" s  test_it.py::test_expensive") for line in result.outlines)


@pytest.mark.parametrize("name", ["test_gone", "test_slow"])
def test_a_listed_test_that_is_no_default_test_fails_the_session(name: str, pytester: pytest.Pytester) -> None:
    result = run(pytester, EXPENSIVE, "test_it.py::test_expensive", f"test_it.py::{name}", "test_other.py::test_it")
    (error,) = errors(result)
    assert result.ret == pytest.ExitCode.TESTS_FAILED and f"test_it.py::{name}" in error


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_default_test_that_starts_a_ray_fails_the_session(is_listed: bool, pytester: pytest.Pytester) -> None:
    names = ["test_it.py::cluster"] if is_listed else []
    result = run(pytester, STARTS_RAY, *names, options=("test_it.py",))
    assert result.ret == (pytest.ExitCode.OK if is_listed else pytest.ExitCode.TESTS_FAILED)
    assert ["test_it.py::cluster" in error for error in errors(result)] == [True] * (not is_listed)
