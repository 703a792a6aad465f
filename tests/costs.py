"""Measures each default test. A complete session fails if a default test is expensive and not listed here.

The cost of a test is the time that it needs alone on an idle machine like that of `_REFERENCE_S`, without fixtures that
other tests share. It is a lower bound, so that other programs on the machine do not raise it:

- CPU seconds of this process and of its ended children
- the rest of the wall time, less the time in which any process of the machine waited for a core, for a disk or for
  memory (/proc/pressure). It finds tests that sleep or wait for processes of Ray, on a machine that is nearly idle.

Their sum is divided by the slowdown of a fixed loop. A test that would fail its session runs again, and its cost is the
lower of the two: the first test that uses a library also imports it, and the other programs of a machine change. Only
complete sessions repeat a test or fail because of a cost, because in sessions of given paths other tests come first.

A test must use the Ray of its session, because each start of a Ray takes seconds of both cores. tests/ray_starts.py
finds other Rays, as a process of its own, because some tests count the threads and files of this process.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.selection import PROCESS_FIXTURES

LIMIT_S = 2.0
"""Seconds above which the cost of a default test is reported."""

MARGIN = 2.0
"""Factor of the limit above which the session fails, because the speed of machines differs."""

LISTED: dict[str, str] = {
    "tests/controller/backends/test_address.py::local_run": "a Ray whose token differs from that of its user",
    "tests/controller/test_cluster_restart.py::test_recoverable_processes_are_retained_and_others_restart": (
        "the only restart of a cluster: some of its processes start twice"
    ),
    "tests/engines/rollout/vllm/test_engine.py::test_the_engine_implements_the_protocols_of_its_capabilities": (
        "the first call of the session's vLLM, which compiles its kernels"
    ),
    "tests/recipes/test_concurrent_evaluation.py"
    "::test_the_record_of_a_step_has_the_values_of_a_blocking_evaluation_of_its_weights": (
        "a run with concurrent evaluations, and blocking evaluations of its weights"
    ),
    "tests/recipes/test_multinode.py::test_ppo_trains_on_two_hosts": (
        "the only start of several hosts, each with a Ray process of its own"
    ),
    "tests/recipes/test_old_logprobs.py::test_grpo_with_one_update_has_the_same_metrics_for_each_choice": (
        "a run for each of three choices"
    ),
    "tests/recipes/test_quickstart.py::run": "the only run that learns, with the commands of the README",
    "tests/recipes/test_restarts.py"
    "::test_a_killed_trainer_rank_repeats_the_steps_since_the_checkpoint_and_restarts_no_replica[sync]": (
        "the only restart of a recipe: a complete run, and one whose processes start twice"
    ),
    "tests/recipes/test_resume.py::test_sft_resumes_with_unseen_examples": "a run, and its resume",
    "tests/recipes/test_schedules.py::test_async_without_staleness_is_bitwise_identical_to_sync": "two runs",
    "tests/recipes/test_schedules.py::test_one_step_off_trains_on_responses_of_the_previous_weights": (
        "a run that is compared with generations outside of it"
    ),
    "tests/recipes/test_vllm.py::test_ppo_split_runs_with_vllm": "the only run with vLLM, which starts in its process",
    "tests/recipes/test_write_a_recipe.py::test_the_documented_program_resumes_with_its_kl_coefficient": (
        "a run of the documented program, and its resume"
    ),
    "tests/report/test_trace.py::test_trace_of_a_real_run": "three calls of a second, so that waits exceed overhead",
    "tests/report/trackers/test_trackers.py::test_wandb_has_metrics_tables_and_results": "wandb starts its own process",
    "tests/run/test_loop.py::test_ray_gives_the_same_metrics": "a run on Ray, whose processes start for it",
    "tests/run/test_restarts.py::test_a_restart_retains_the_other_processes": "processes on Ray that start twice",
}
"""Default test, or shared fixture (FILE::NAME), that may cost more or start a Ray -> reason."""

MAX_LISTED = 25

_REMEDY = "make it cheaper, mark it slow, or list it with a reason in LISTED of tests/costs.py"
_PRESSURE = Path("/proc/pressure")
_REFERENCE_S = 0.0094
"""CPU seconds of the loop in `read_slowdown` on an idle machine of docs/benchmarks.md."""


@dataclass(frozen=True)
class Clocks:
    """Clocks at one moment, or differences between two moments, in seconds."""

    wall: float
    cpu: float
    """CPU time of this process and of its ended children."""
    waiting: float
    """Time in which at least one process of the machine waited for a core, a disk or memory."""

    def __add__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall + other.wall, self.cpu + other.cpu, self.waiting + other.waiting)

    def __sub__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall - other.wall, self.cpu - other.cpu, self.waiting - other.waiting)

    def cost(self, slowdown: float = 1.0) -> float:
        """Returns a lower bound for the seconds on an idle machine, if computing is slower by a factor here."""
        return (self.cpu + max(0.0, self.wall - self.waiting - self.cpu)) / slowdown


def read_clocks() -> Clocks:
    """Returns the current values of all clocks."""
    times, wall = os.times(), time.perf_counter()
    cpu = times.user + times.system + times.children_user + times.children_system
    try:
        texts = [(_PRESSURE / name).read_text() for name in ("cpu", "io", "memory")]
    except OSError:  # the system does not measure it, so all wall time may be waiting
        return Clocks(wall, cpu, wall)
    return Clocks(wall, cpu, sum(int(text.split("total=", 1)[1].split()[0]) for text in texts) / 1e6)


def read_slowdown() -> float:
    """Returns the factor (at least 1) by which computing is slower than on the reference machine, in this moment."""
    start = time.thread_time()
    total = 0
    for i in range(300_000):
        total += i % 7
    return max(1.0, (time.thread_time() - start) / _REFERENCE_S)


@dataclass(frozen=True)
class Span:
    """The time (monotonic) of a test, or of the setup of a shared fixture."""

    name: str
    start: float
    end: float
    is_allowed: bool
    """Whether it may start a Ray."""


class Costs:
    """A plugin that adds the costs of tests to their reports, and fails the session for expensive default tests."""

    def __init__(
        self, limit_s: float = LIMIT_S, listed: Mapping[str, str] = LISTED, ray_program: str = "gcs_server"
    ) -> None:
        self._limit_s, self._listed, self._ray_program = limit_s, listed, ray_program
        self._spent = Clocks(0.0, 0.0, 0.0)
        self._start = 0.0
        self._is_slow = False
        self._is_shared = False
        self._spans: list[Span] = []
        """In the order of their ends: a fixture precedes the fixture or test that sets it up."""
        self._expensive: dict[str, float] = {}
        self._errors: list[str] = []
        self._cost = 0.0
        """Of the test that ran last."""

    def pytest_sessionstart(self) -> None:
        self._starts = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end of the session)
        root = Path(__file__).parents[1]
        command = [sys.executable, "-m", "tests.ray_starts", str(os.getpid()), self._ray_program]
        self._watch = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._starts, cwd=root, start_new_session=True
        )

    def ray_starts(self) -> list[float]:
        """Returns when each Ray below this process has started, as far as it is known (monotonic seconds)."""
        return [float(line) for line in os.pread(self._starts.fileno(), 1 << 20, 0).splitlines()]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Checks that listed tests exist in the imported files, before options deselect tests."""
        if any("::" in argument for argument in config.args):
            return
        files, names = set(), set()
        for item in items:
            file = item.nodeid.split("::")[0]
            files.add(file)
            if item.get_closest_marker("slow") is None:
                names |= {item.nodeid, *(f"{file}::{name}" for name in getattr(item, "fixturenames", ()))}
        self._errors += [
            f"{name} is listed, but no default test has this name: remove it from LISTED of tests/costs.py"
            for name in self._listed
            if name.split("::")[0] in files and name not in names
        ]

    @contextmanager
    def _measure(self) -> Iterator[None]:
        start = read_clocks()
        try:
            yield
        finally:
            self._spent += read_clocks() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
        """Measures a test again that would fail the session, and retains the lower cost."""
        result = yield
        cost = self._expensive.get(item.nodeid, 0.0)
        if cost > self._limit_s * MARGIN and _is_complete(item.config):
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            if all(report.passed for report in reports):
                self._expensive[item.nodeid] = min(cost, self._cost)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._spent, self._start = Clocks(0.0, 0.0, 0.0), time.monotonic()
        self._is_slow = item.get_closest_marker("slow") is not None
        with self._measure():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[object]:
        """Subtracts fixtures that other tests share."""
        if fixturedef.scope == "function":
            return (yield)
        is_outer, self._is_shared = not self._is_shared, True
        start, clocks = time.monotonic(), read_clocks()
        try:
            return (yield)
        finally:
            if is_outer:
                self._is_shared = False
                self._spent -= read_clocks() - clocks
            is_allowed = self._is_slow or fixturedef.argname in PROCESS_FIXTURES
            name = f"{fixturedef.baseid}::{fixturedef.argname}"
            self._spans.append(Span(name, start, time.monotonic(), is_allowed))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            with self._measure():
                return (yield)
        finally:
            cost = self._spent.cost()
            if cost > self._limit_s and not self._is_slow:
                cost = self._spent.cost(read_slowdown())
                if cost > self._limit_s and item.nodeid not in self._listed:
                    self._expensive[item.nodeid] = cost
            self._cost = cost
            item.user_properties.append(("cost_s", cost))
            self._spans.append(Span(item.nodeid, self._start, time.monotonic(), self._is_slow))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        limit_s = self._limit_s * MARGIN
        if _is_complete(session.config):
            self._errors += [
                f"{test} costs {cost:.1f} s, and a default test may cost {limit_s:g} s: {_REMEDY}"
                for test, cost in self._expensive.items()
                if cost > limit_s
            ]
        for start in self.ray_starts():
            span = next((span for span in self._spans if span.start <= start <= span.end), None)
            if span is not None and not span.is_allowed and span.name not in self._listed:
                self._errors.append(f"{span.name} starts a Ray, not that of `ray_session`: {_REMEDY}")
        self._watch.kill()
        self._watch.wait()
        self._starts.close()
        if self._errors and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reported = [(cost, test) for test, cost in self._expensive.items() if cost > self._limit_s]
        if reported:
            terminalreporter.section(f"default tests that cost more than {self._limit_s:g} s (tests/costs.py)")
        for cost, test in sorted(reported, reverse=True):
            terminalreporter.line(f"{cost:6.1f} s  {test}")
        for error in self._errors:
            terminalreporter.line(f"ERROR {error}", red=True)


def _is_complete(config: pytest.Config) -> bool:
    """Returns whether a session has all tests of its markers."""
    has_paths = config.args_source is pytest.Config.ArgsSource.ARGS
    return not (has_paths or config.getoption("keyword") or config.getoption("lf", False))
