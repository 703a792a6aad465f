"""Default tests, parts of the slow tests, and the two commands of tests/run_tests.sh.

tests/conftest.py applies these tables: each slow test receives the marker of its part, and each test that starts
processes the marker `processes`. Each command imports only the files that can contain its tests.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

PARTS: dict[str, tuple[str, ...]] = {
    "benchmarks": ("benchmarks/",),
    "browser": ("report/page/", "report/viewer/"),
    "learning": (
        "health/",
        "recipes/test_detached_scripts.py",
        "recipes/test_games.py",
        "recipes/test_moe.py",
        "recipes/test_preferences_learn.py",
        "recipes/test_reasoning.py",
        "recipes/test_rollout_recipes_learn.py",
        "recipes/test_schedules_learn.py",
        "recipes/test_seeds.py",
        "recipes/test_stories.py",
        "recipes/test_tools.py",
        "recipes/test_vllm_learns.py",
        "test_your_own_task.py",
    ),
    "faults": (
        "chaos/",
        "checkpoints/",
        "controller/",
        "environments/",
        "inference/test_chat_terminal.py",
        "recipes/test_bad_checkpoints.py",
        "recipes/test_bad_input.py",
        "recipes/test_endings.py",
        "recipes/test_restarts.py",
        "recipes/test_timeouts.py",
        "rewards/",
        "run/test_growth.py",
        "run/test_killed.py",
        "run/test_restarts.py",
        "run/test_sleeping_run.py",
        "schedules/",
    ),
    "products": ("",),
}
"""Part of the slow tests -> files and folders of tests/. A test belongs to the first part that contains its path."""

PROCESS_FIXTURES = {"ray_session"}
"""Fixtures whose tests share one Ray, one fork server and one vLLM."""

PROCESS_PATHS: tuple[str, ...] = ("recipes/", "engines/rollout/vllm/")
"""Files and folders of tests/ that start processes without such a fixture: programs, Rays of their own, vLLM.

The command without processes does not import them.
"""

MIXED_PATHS: tuple[str, ...] = (
    "checkpoints/test_saver.py",
    "controller/",
    "inference/evaluation/test_evaluate_models.py",
    "inference/serving/test_model_server.py",
    "inference/test_vllm_commands.py",
    "report/test_trace.py",
    "run/replay/test_replay.py",
    "run/test_doctor.py",
    "run/test_loop.py",
    "run/test_loop_outputs.py",
    "run/test_restarts.py",
    "run/test_sleeping_run.py",
    "weight_sync/test_transfer.py",
    "workers/test_judge.py",
    "workers/test_quantized_rollout.py",
    "workers/test_reward.py",
    "workers/test_streaming.py",
)
"""Files and folders of tests/ in which some tests start processes. Both commands import them.

The command with processes imports no other file, so `mark` rejects tests of other files that start processes.
"""


def part_of(path: Path) -> str:
    """Returns the part of the slow tests that contains a test file."""
    name = path.relative_to(TESTS).as_posix()
    return next(part for part, prefixes in PARTS.items() if name.startswith(prefixes))


def starts_processes(item: pytest.Item) -> bool:
    """Returns whether a test belongs to the command with the session's Ray."""
    if item.path.relative_to(TESTS).as_posix().startswith(PROCESS_PATHS) or item.get_closest_marker("vllm"):
        return True
    if not isinstance(item, pytest.Function):
        return False
    # Tests on both backends need Ray only for one of their cases.
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    on_ray = any(isinstance(value, str) and value == "ray" for value in parameters)
    return on_ray or not PROCESS_FIXTURES.isdisjoint(item.fixturenames)


def is_ignored(path: Path, expression: str) -> bool:
    """Returns whether `-m expression` selects no test of a test file, or of a folder, as far as its path shows.

    Such expressions are `processes` and `not processes`, alone or joined to others by `and`.
    """
    if not path.is_relative_to(TESTS):
        return False
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError:  # empty, or not an expression of Python
        return False
    joined = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    conditions = {ast.unparse(condition) for condition in joined}
    name = path.relative_to(TESTS).as_posix() + ("/" if path.is_dir() else "")
    if "not processes" in conditions and name.startswith(PROCESS_PATHS):
        return True
    return "processes" in conditions and path.is_file() and not name.startswith((*PROCESS_PATHS, *MIXED_PATHS))


def add_markers(config: pytest.Config) -> None:
    """Registers the markers that `mark` adds."""
    config.addinivalue_line("markers", "processes: uses the Ray of the session, or starts programs or a Ray of its own")
    for part in PARTS:
        config.addinivalue_line("markers", f"{part}: slow test of this part")


def mark(item: pytest.Item) -> None:
    """Adds the markers of a test's part and of its command."""
    if item.get_closest_marker("slow"):
        item.add_marker(part_of(item.path))
    if starts_processes(item):
        name = item.path.relative_to(TESTS).as_posix()
        if not name.startswith((*PROCESS_PATHS, *MIXED_PATHS)):
            raise pytest.UsageError(
                f"{item.nodeid} starts processes, so tests/{name} must be listed in MIXED_PATHS of tests/selection.py; "
                "otherwise no command of tests/run_tests.sh runs the test"
            )
        item.add_marker("processes")
