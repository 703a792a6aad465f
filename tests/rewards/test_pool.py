"""A pool scores rows in other processes. A call that misbehaves costs only its row, and no process is left."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrl.data.folders.private_folder import MARKER, create_folder
from flowrl.rewards.pool import PoolLimits, ScoringPool
from flowrl.rewards.reward_function import FunctionSpec, Outcome
from flowrl.user_code.guard import MAX_SHARED_MEMORY_MB
from tests.slow_cases import one_of
from tests.user_code import misbehaving
from tests.user_code.attacks import SHARED_MEMORY_KEY, reach

ROOT = Path(__file__).parents[2]
FOLDER = "tests.user_code"
MARK = "FLOWRL_TEST_MARK"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks the processes of a pool by an environment variable, and checks that the test leaves none, no descriptor
    and no thread.
    """
    mark = str(uuid.uuid4())
    monkeypatch.setenv(MARK, mark)
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    yield mark
    deadline_s = time.monotonic() + 30
    while (left := marked_processes(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert left == []
    # Threads of earlier tests may have ended in between.
    after = (len(os.listdir("/proc/self/fd")), threading.active_count())
    assert all(number <= earlier for number, earlier in zip(after, before, strict=True)), (before, after)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Returns the processes of pools, which include those that left their session."""
    marked = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                marked.append(process)
        except psutil.Error:
            continue
    return marked


@pytest.fixture
def private() -> Iterator[Path]:
    """A private folder with a token and a socket, as a run without `address` has."""
    with create_folder("run") as folder, socket.socket(socket.AF_UNIX) as listener:
        (folder / "token").write_text("secret")
        listener.bind(str(folder / "socket"))
        listener.listen()
        yield folder


def skip_without(protection: str, missing: Sequence[str]) -> None:
    if protection in missing:
        pytest.skip(f"this system does not offer the protection of {protection}")


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def make_pool(*functions: FunctionSpec, workers: int = 2, timeout_s: float = 60, **limits: Any) -> ScoringPool:
    settings = PoolLimits(workers, timeout_s, environment=(MARK,), **limits)
    return ScoringPool(functions, settings)


def score_kinds(spec: FunctionSpec, kinds: Sequence[str], **limits: Any) -> list[Outcome]:
    """Returns the outcomes of rows of these kinds. The row at index i has a response of length i."""
    with make_pool(spec, **limits) as pool:
        futures = [
            pool.submit(spec.name, {"response": "x" * i, "kind": kind, "prompt": "p"}) for i, kind in enumerate(kinds)
        ]
        return [future.result(timeout=200) for future in futures]


SYNC = FunctionSpec("sync", f"{FOLDER}.misbehaving:score")
ASYNC = FunctionSpec("async", f"{FOLDER}.misbehaving:score_async")
BATCHED = FunctionSpec("batched", f"{FOLDER}.misbehaving:score_batch", batch_size=4)

INVALID = ("none", "nan", "infinite", "text", "complex", "large", "too_large", "no_number")
RAISED = (
    "exception", "system_exit", "keyboard_interrupt", "unprintable", "long_message", "surrogates", "recursion",
)  # fmt: skip
KILLED = ("kill", "terminate", "segfault", "abort")
TIMED_OUT = ("hang", "loop", "native_hang", "hang_without_signals", "stop", "print")
CORRUPT = ("garbage", "long_frame", "nested_frame", "forged_score", "add_rows")
HARMLESS = ("change_process", "daemon", "thread", "program", "fork_and_return", "close_output")
CASES = [
    *((SYNC, kind, ("invalid",)) for kind in INVALID),
    *((SYNC, kind, ("raised",)) for kind in RAISED),
    *((SYNC, kind, ("killed",)) for kind in KILLED),
    *((SYNC, kind, ("timeout",)) for kind in TIMED_OUT),
    *((SYNC, kind, ("corrupt",)) for kind in CORRUPT),
    *((SYNC, kind, (None,)) for kind in HARMLESS),
    (SYNC, "exit", ("exited",)),
    (SYNC, "close_descriptors", ("exited",)),
    (SYNC, "memory", ("memory",)),
    (SYNC, "fork_bomb", ("raised", "timeout")),
    # They are errors if the kernel hides or protects the processes, and otherwise end the process.
    (SYNC, "kill_parent", ("raised", "killed", "timeout")),
    (SYNC, "signal_all", ("raised", "killed", None)),
    *((ASYNC, kind, ("timeout",)) for kind in ("async_hang", "not_cancelled", "hang", "loop")),
    *((ASYNC, kind, ("raised",)) for kind in ("exception", "system_exit", "cancelled")),
    (ASYNC, "nan", ("invalid",)),
    (ASYNC, "exit", ("exited",)),
    (ASYNC, "segfault", ("killed",)),
    (ASYNC, "garbage", ("corrupt",)),
    *((BATCHED, kind, ("invalid",)) for kind in ("short", "number", "nan", "none")),
    (BATCHED, "exception", ("raised",)),
    (BATCHED, "exit", ("exited",)),
    (BATCHED, "segfault", ("killed",)),
    (BATCHED, "hang", ("timeout",)),
    (BATCHED, "memory", ("memory",)),
]


FAST = {
    ("sync", "hang"), ("sync", "exception"), ("sync", "none"), ("sync", "exit"), ("sync", "kill"), ("sync", "garbage"),
    ("batched", "short"),
}  # fmt: skip
"""Cases that are no slow tests, because all cases take minutes together."""


@pytest.mark.parametrize(
    ("spec", "kind", "expected"),
    [
        pytest.param(*case, id=f"{case[0].name}-{case[1]}", marks=[pytest.mark.slow] * (key not in FAST))
        for case in CASES
        for key in [(case[0].name, case[1])]
    ],
)
def test_misbehavior_costs_only_its_row(
    mark: str, spec: FunctionSpec, kind: str, expected: tuple[str | None, ...]
) -> None:
    timeout_s = 2 if "timeout" in expected else 60
    memory_mb = 1000 if kind == "memory" else None
    kinds = ["", "", kind, "", "", "", ""]
    outcomes = score_kinds(spec, kinds, timeout_s=timeout_s, memory_mb=memory_mb)
    others = [outcome for outcome in outcomes if outcome is not outcomes[2]]
    assert [(outcome.score, outcome.failure) for outcome in others] == [(float(i), None) for i in (0, 1, 3, 4, 5, 6)]
    assert outcomes[2].failure in expected, outcomes[2]
    assert (outcomes[2].score is None) == (outcomes[2].failure is not None)
    assert bool(outcomes[2].message) == (outcomes[2].failure is not None)
    assert len(outcomes[2].message) < 10_000
    assert [outcome.num_attempts for outcome in outcomes] == [1] * 7


def test_missing_protections_are_known_before_the_first_row(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("import os\ndef score(response):\n    return os.readlink('/proc/self/ns/user') == response\n")
    with make_pool(FunctionSpec("score", f"{path}:score")) as pool:
        missing = pool.find_missing_protections()
        assert marked_processes(mark)
        outcome = pool.submit("score", {"response": os.readlink("/proc/self/ns/user")}).result(timeout=200)
        assert missing == pool.unavailable == pool.find_missing_protections()
        has_own_namespace = outcome.score == 0
        assert has_own_namespace or "environment" in missing, outcome
    with pytest.raises(RuntimeError):
        pool.find_missing_protections()


@pytest.mark.parametrize("spec", one_of(SYNC, ASYNC, BATCHED), ids=lambda spec: spec.name)
def test_every_second_row_misbehaves(mark: str, spec: FunctionSpec) -> None:
    kinds = ["exit", "", "exception", "", "none", "", "kill", "", "segfault", "", "garbage", ""] * 2
    failures = ["exited", None, "raised", None, "invalid", None, "killed", None, "killed", None, "corrupt", None] * 2
    outcomes = score_kinds(spec, kinds, workers=3)
    assert [outcome.failure for outcome in outcomes] == failures
    assert [o.score for o in outcomes] == [None if failures[i] else float(i) for i in range(len(kinds))]


@pytest.mark.parametrize("workers", one_of(1, 2))
def test_a_failed_row_is_retried_in_another_process(mark: str, tmp_path: Path, workers: int) -> None:
    source = (
        "import os, pathlib\n"
        "def score(response, fails):\n"
        "    file = pathlib.Path(response)\n"
        "    file.open('a').write(os.readlink('/proc/self/ns/pid') + ' ' + str(os.getpid()) + '\\n')\n"
        "    if len(file.read_text().splitlines()) <= fails:\n"
        "        raise ValueError(fails)\n"
        "    return 7\n"
    )
    (tmp_path / "flaky.py").write_text(source)
    with make_pool(FunctionSpec("flaky", f"{tmp_path / 'flaky.py'}:score"), workers=workers, retries=2) as pool:
        futures = [pool.submit("flaky", {"response": str(tmp_path / str(n)), "fails": n}) for n in (0, 1, 2, 3)]
        outcomes = [future.result(timeout=200) for future in futures]
    assert [(o.score, o.failure, o.num_attempts) for o in outcomes] == [
        (7, None, 1), (7, None, 2), (7, None, 3), (None, "raised", 3),
    ]  # fmt: skip
    processes = [(tmp_path / str(n)).read_text().splitlines() for n in (1, 2, 3)]
    assert all(before != after for used in processes for before, after in itertools.pairwise(used))


@pytest.mark.parametrize(
    "statement",
    one_of("1 / 0", "import os; os._exit(4)", "raise SystemExit", "def g(): pass"),
)
def test_a_function_that_cannot_be_loaded_fails_its_rows_with_one_message(
    mark: str, tmp_path: Path, statement: str
) -> None:
    (tmp_path / "broken.py").write_text(f"{statement}\n")
    broken = FunctionSpec("broken", f"{tmp_path / 'broken.py'}:score")
    with make_pool(broken, SYNC) as pool:
        futures = [pool.submit("broken", {"response": ""}) for _ in range(20)]
        outcomes = [future.result(timeout=200) for future in futures]
        outcomes.append(pool.submit("broken", {"response": ""}).result(timeout=200))
        assert pool.submit("sync", {"response": "xy", "kind": ""}).result(timeout=200).score == 2
        assert pool.start().wait(200)
    assert {outcome.failure for outcome in outcomes} == {"not_loaded"}
    (message,) = {outcome.message for outcome in outcomes}
    assert str(tmp_path / "broken.py") in message or "broken" in message


@pytest.mark.parametrize(("num_kills", "failure"), [(2, None), (3, "not_loaded")])
def test_an_import_that_is_killed_is_repeated_twice(mark: str, tmp_path: Path, num_kills: int, failure: str) -> None:
    """A program outside may have killed the process."""
    (tmp_path / "killed.py").write_text(
        f"import os, pathlib\nfile = pathlib.Path({str(tmp_path / 'imports')!r})\nfile.open('a').write('x')\n"
        f"if len(file.read_text()) <= {num_kills}:\n    os.kill(os.getpid(), 9)\n"
        "def score(response):\n    return 1\n"
    )
    with make_pool(FunctionSpec("killed", f"{tmp_path / 'killed.py'}:score"), workers=1) as pool:
        outcomes = [pool.submit("killed", {"response": ""}).result(timeout=200) for _ in range(2)]
    assert [outcome.failure for outcome in outcomes] == [failure] * 2
    assert len((tmp_path / "imports").read_text()) == 3


@pytest.mark.slow
def test_an_import_that_hangs_fails_at_its_deadline(mark: str) -> None:
    spec = FunctionSpec("slow", f"{FOLDER}.slow_import:score")
    with make_pool(spec, load_timeout_s=1) as pool:
        outcome = pool.submit("slow", {"response": ""}).result(timeout=200)
    assert outcome.failure == "timeout" and "slow_import.py" in outcome.message


def test_several_functions_receive_their_columns(mark: str, tmp_path: Path) -> None:
    source = (
        "import os\n"
        "def named(response, token_ids, finish_reason='none'):\n    return sum(token_ids) + len(finish_reason)\n"
        "def others(response, scale, **columns):\n    return scale * len(columns)\n"
        "def lists(response, level):\n    return [len(response)] * len(response)\n"
        "async def variables(response):\n    return len(os.environ.get('SECRET_OF_DRIVER', ''))\n"
    )
    (tmp_path / "several.py").write_text(source)
    specs = [FunctionSpec(name, f"{tmp_path / 'several.py'}:{name}") for name in ("named", "variables")]
    specs.append(FunctionSpec("others", f"{tmp_path / 'several.py'}:others", {"scale": 10}))
    specs.append(FunctionSpec("lists", f"{tmp_path / 'several.py'}:lists", batch_size=64))
    row = {
        "prompt": "p", "response": "r", "answer": 3, "level": None, "scale": 99, "token_ids": [1, 2],
        "finish_reason": "length", "conversation": [{"role": "user", "content": "p"}], "data_source": "d",
    }  # fmt: skip
    os.environ["SECRET_OF_DRIVER"] = "secret"
    try:
        with make_pool(*specs) as pool:
            futures = [pool.submit(spec.name, row) for spec in specs for _ in range(3)]
            scores = [future.result(timeout=200).score for future in futures]
    finally:
        del os.environ["SECRET_OF_DRIVER"]
    assert scores[:9] == [9, 9, 9, 0, 0, 0, 30, 30, 30]
    assert all(score in (1, 2, 3) for score in scores[9:])


@pytest.mark.slow
def test_a_process_of_async_calls_imports_other_functions(mark: str, tmp_path: Path) -> None:
    """The request to import arrives while the last async call ends."""
    names = [f"score_{i}" for i in range(8)]
    source = "async def first(response):\n    return 0\n"
    (tmp_path / "mixed.py").write_text(source + "".join(f"def {name}(response):\n    return 1\n" for name in names))
    specs = [FunctionSpec(name, f"{tmp_path / 'mixed.py'}:{name}") for name in ("first", *names)]
    with make_pool(*specs, workers=1) as pool:
        for name in names:
            futures = [pool.submit(each, {"response": ""}) for each in ("first", name)]
            assert [future.result(timeout=60).score for future in futures] == [0, 1]


def test_a_value_that_cannot_be_sent_fails_only_its_row(mark: str) -> None:
    with make_pool(BATCHED) as pool:
        futures = [pool.submit("batched", {"response": value, "kind": ""}) for value in ("ab", object(), "abc")]
        outcomes = [future.result(timeout=200) for future in futures]
    assert [(outcome.score, outcome.failure) for outcome in outcomes] == [(2, None), (None, "invalid"), (3, None)]
    assert "response" in outcomes[1].message


def test_a_timeout_names_function_and_line(mark: str) -> None:
    lines = Path(misbehaving.__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if '"hang": lambda' in text)
    with make_pool(ASYNC, SYNC, timeout_s=1) as pool:
        rows = [(ASYNC, "async_hang"), (SYNC, "hang")]
        futures = [pool.submit(spec.name, {"response": "", "kind": kind, "prompt": "p"}) for spec, kind in rows]
        of_async, of_sync = (future.result(timeout=200).message for future in futures)
    assert "score_async" in of_async and misbehaving.__file__ in of_async
    assert f"{misbehaving.__file__}, line {line}" in of_sync


def test_the_last_output_is_reported(mark: str, tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text("import os\ndef score(response):\n    print('reason 17')\n    os._exit(1)\n")
    with make_pool(FunctionSpec("printing", f"{tmp_path / 'printing.py'}:score")) as pool:
        assert "reason 17" in pool.submit("printing", {"response": ""}).result(timeout=200).message


@pytest.mark.slow
def test_the_last_output_has_no_text_of_another_row(mark: str, tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(
        "import os\n"
        "def score(response):\n"
        "    if response:\n        os.write(1, f'text of {response};'.encode())\n"
        "    if response == 'row 20':\n        os._exit(3)\n"
        "    return 1\n"
    )
    with make_pool(FunctionSpec("printing", f"{tmp_path / 'printing.py'}:score"), workers=1) as pool:
        for _ in range(8):  # until the process receives many rows at a time
            for future in [pool.submit("printing", {"response": ""}) for _ in range(32)]:
                future.result(timeout=200)
        rows = [f"row {i}" if i in (10, 20) else "" for i in range(32)]
        futures = [pool.submit("printing", {"response": response}) for response in rows]
        outcomes = [future.result(timeout=200) for future in futures]
    assert [i for i, outcome in enumerate(outcomes) if outcome.failure] == [20]
    assert outcomes[20].failure == "exited" and outcomes[20].message.endswith("its last output: text of row 20;")


def test_async_calls_run_concurrently_in_one_process(mark: str, tmp_path: Path) -> None:
    """Each call waits until all 16 have started."""
    source = (
        "import asyncio\nstarted = 0\n"
        "async def score(response):\n"
        "    global started\n    started += 1\n"
        "    while started < 16:\n        await asyncio.sleep(0.01)\n"
        "    return started\n"
    )
    (tmp_path / "together.py").write_text(source)
    spec = FunctionSpec("together", f"{tmp_path / 'together.py'}:score")
    with make_pool(spec, workers=1, max_concurrent=16) as pool:
        futures = [pool.submit("together", {"response": ""}) for _ in range(16)]
        assert [future.result(timeout=200).score for future in futures] == [16] * 16


def submit(pool: ScoringPool, *kinds: str, prompt: str = "p") -> "list[Future[Outcome]]":
    return [pool.submit("sync", {"response": "x" * i, "kind": kind, "prompt": prompt}) for i, kind in enumerate(kinds)]


def make_fast(pool: ScoringPool) -> None:
    """Scores rows until a process receives many rows of the function `sync` at a time."""
    for _ in range(8):
        for future in submit(pool, *[""] * 32):
            assert future.result(timeout=200).failure is None


@pytest.mark.slow
def test_rows_do_not_wait_for_a_slow_row_before_them(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with make_pool(SYNC) as pool:
        make_fast(pool)
        slow, *others = submit(pool, "wait", *[""] * 40, prompt=str(end))
        assert [future.result(timeout=200).score for future in others] == list(range(1, 41))
        assert not slow.done()
        end.touch()
        assert slow.result(timeout=200).score == 0


@pytest.mark.slow
def test_each_row_of_a_message_fails_alone() -> None:
    kinds = ["", "exit", "", "exception", "none", "", "kill", "", "garbage", ""]
    with make_pool(SYNC, workers=1) as pool:
        make_fast(pool)
        outcomes = [future.result(timeout=200) for future in submit(pool, *kinds)]
    failures = [None, "exited", None, "raised", "invalid", None, "killed", None, "corrupt", None]
    assert [outcome.failure for outcome in outcomes] == failures
    assert [outcome.score for outcome in outcomes if outcome.failure is None] == [0, 2, 5, 7, 9]
    assert {outcome.num_attempts for outcome in outcomes} == {1}


class SlowlyEncoded:
    def tolist(self) -> list[float]:
        time.sleep(0.02)
        return []


@pytest.mark.slow
def test_rows_with_slow_encodings_share_messages(tmp_path: Path) -> None:
    """The score of a row is the time since the call before it. Between two messages, it includes an encoding."""
    (tmp_path / "gaps.py").write_text(
        "import time\nlast_s = 0\n"
        "def score(response, values):\n"
        "    global last_s\n    before_s, last_s = last_s, time.monotonic()\n"
        "    return min(last_s - before_s, 1)\n"
    )
    with make_pool(FunctionSpec("gaps", f"{tmp_path / 'gaps.py'}:score"), workers=1) as pool:
        futures = [pool.submit("gaps", {"response": "", "values": SlowlyEncoded()}) for _ in range(16)]
        gaps_s = [future.result(timeout=200).score for future in futures]
    assert min(gap_s for gap_s in gaps_s if gap_s is not None) < 0.02


@pytest.mark.slow
def test_rows_that_a_process_adds_end_it(mark: str) -> None:
    """The slow row after them makes the pool count the rows that have not begun."""
    with make_pool(SYNC, workers=1) as pool:
        make_fast(pool)
        outcomes = [future.result(timeout=200) for future in submit(pool, "", "add_rows", "doze", *[""] * 20)]
    assert [outcome.failure for outcome in outcomes if outcome.failure] == ["corrupt"]


def test_each_row_of_a_message_has_the_whole_timeout(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef score(response):\n    time.sleep(0.4 * len(response))\n    return 1.0\n"
    )
    with make_pool(FunctionSpec("sync", f"{tmp_path / 'slow.py'}:score"), workers=1, timeout_s=1.2) as pool:
        for _ in range(6):
            for future in [pool.submit("sync", {"response": ""}) for _ in range(16)]:
                future.result(timeout=200)
        futures = [pool.submit("sync", {"response": "x"}) for _ in range(4)]
        assert [future.result(timeout=200).failure for future in futures] == [None] * 4


@pytest.mark.slow
def test_processes_start_as_rows_need_them(mark: str) -> None:
    with make_pool(SYNC, workers=4) as pool:
        assert marked_processes(mark) == []
        assert pool.submit("sync", {"response": "abc", "kind": ""}).result(timeout=200).score == 3
        few = len(marked_processes(mark))
        assert pool.start().wait(200)
        assert len(marked_processes(mark)) == few + 3 * 2  # the launcher is shared


def test_close_ends_calls_in_flight_and_rejects_rows(mark: str) -> None:
    pool = make_pool(SYNC, BATCHED)
    futures = [pool.submit("sync", {"response": "", "kind": "hang"}) for _ in range(5)]
    futures.append(pool.submit("batched", {"response": "", "kind": "hang"}))
    cancelled = pool.submit("sync", {"response": "", "kind": "hang"})
    assert cancelled.cancel()
    pool.close()
    pool.close()
    assert {future.result(timeout=0).failure for future in futures} == {"closed"}
    with pytest.raises(RuntimeError):
        pool.submit("sync", {"response": "", "kind": ""})


def test_private_folders_cannot_be_reached(mark: str, private: Path) -> None:
    """Their sockets start any program, and their token gives control over Ray."""
    assert {"list", "token", "socket"} <= set(reach(private))
    with make_pool(FunctionSpec("attack", f"{FOLDER}.attacks:count_ways"), workers=1) as pool:
        skip_without("private_folders", pool.find_missing_protections())
        assert pool.submit("attack", {"response": str(private)}).result(timeout=200).score == 0


def test_the_temporary_folder_within_a_private_folder_is_writable(
    mark: str, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run without `address`, the temporary files of all processes are in the private folder of the driver."""
    (private / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private / "t"))
    names = ("write_temporary_file", "count_ways")
    with make_pool(*(FunctionSpec(name, f"{FOLDER}.attacks:{name}") for name in names), workers=1) as pool:
        write, attack = (pool.submit(name, {"response": str(private)}) for name in names)
        assert write.result(timeout=200).score == len(str(private))
        assert len(list(private.glob("t/*/*/file"))) == 1
        skip_without("private_folders", pool.find_missing_protections())
        assert attack.result(timeout=200).score == 0


def test_shared_memory_is_limited_and_freed(mark: str) -> None:
    file = Path("/dev/shm", mark)
    try:
        with make_pool(FunctionSpec("attack", f"{FOLDER}.attacks:leave_shared_memory"), workers=1) as pool:
            skip_without("shared_memory", pool.find_missing_protections())
            assert pool.submit("attack", {"response": mark}).result(timeout=200).score == MAX_SHARED_MEMORY_MB
            assert not file.exists()
    finally:
        file.unlink(missing_ok=True)
    keys = [int(line.split()[0]) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert SHARED_MEMORY_KEY not in keys


def test_an_unused_pool_is_closed(mark: str) -> None:
    make_pool(SYNC).close()


def test_invalid_functions_are_rejected() -> None:
    for functions, workers in (((SYNC, SYNC), 1), ((SYNC,), 0), ((FunctionSpec("f", "m:f", batch_size=0),), 1)):
        with pytest.raises(ValueError):
            ScoringPool(functions, PoolLimits(workers, None))
    with ScoringPool([SYNC], PoolLimits(1, None)) as pool, pytest.raises(KeyError):
        pool.submit("other", {})


def test_a_killed_launcher_is_replaced(mark: str) -> None:
    """Its processes end with it. A row that was sent to one of them before its end is retried in a new process."""
    with make_pool(SYNC, retries=1) as pool:
        assert pool.submit("sync", {"response": "a", "kind": ""}).result(timeout=200).score == 1
        parents = {process.pid: process.ppid() for process in marked_processes(mark)}
        (launcher,) = [pid for pid, parent in parents.items() if parent == os.getpid()]
        os.kill(launcher, signal.SIGKILL)
        assert pool.submit("sync", {"response": "ab", "kind": ""}).result(timeout=200).score == 2


def test_the_folder_of_a_killed_pool_is_removed(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is killed together with the process of the pool, which cannot remove the folder then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with make_pool(SYNC, workers=1) as pool:
        assert pool.submit("sync", {"response": "a", "kind": ""}).result(timeout=200).score == 1
        (folder,) = tmp_path.iterdir()
        assert json.loads((folder / MARKER).read_text())["pid"] == os.getpid()  # a later start can remove it
        (launcher,) = [process for process in marked_processes(mark) if process.ppid() == os.getpid()]
        launcher.kill()
        wait_until(lambda: not folder.exists())


PROGRAM = """
import sys, time
from pathlib import Path
from flowrl.rewards.pool import *
{before}
pool = ScoringPool([FunctionSpec("sync", "tests.user_code.misbehaving:score")], PoolLimits(
    workers=2, timeout_s=60, environment=("FLOWRL_TEST_MARK",)))
assert pool.submit("sync", {{"response": "", "kind": "daemon"}}).result().score == 1
pool.submit("sync", {{"response": "", "kind": "hang_without_signals"}})
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_a_killed_parent(mark: str, tmp_path: Path, number: int) -> None:
    command, variables = [sys.executable, "-c", PROGRAM.format(before="")], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"started\n"
        assert len(marked_processes(mark)) > 4 and any(tmp_path.iterdir())
        os.kill(run.pid, number)
    wait_until(lambda: not any(tmp_path.iterdir()))


NO_NAMESPACES = (
    "from flowrl.user_code import launcher\n"
    "start = launcher.subprocess.Popen\n"
    "def without(command, **settings):\n"
    "    command[2] = command[2].replace('launcher.main', "
    "'from flowrl.user_code import isolation; isolation._can_enter = lambda flags: False; launcher.main', 1)\n"
    "    return start(command, **settings)\n"
    "launcher.subprocess.Popen = without\n"
)
"""Makes the launcher behave as on a system without namespaces."""


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [True, False])
def test_processes_end_without_namespaces(mark: str, is_closed: bool) -> None:
    program = PROGRAM.format(before=NO_NAMESPACES)
    if is_closed:
        program = program.replace("time.sleep(60)", "print(pool.unavailable, flush=True)\npool.close()")
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"started\n"
        if is_closed:
            missing = run.stdout.read()
            assert all(name in missing for name in (b"descendants", b"private_folders", b"shared_memory"))
            assert run.wait(timeout=120) == 0
        else:
            os.kill(run.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_temporary_files_of_a_killed_process_are_removed(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {"timeout_s": 100.0, "total_timeout_s": 100.0}
    row = {"response": "```python\nwhile True: pass\n```", "tests": [{"input": "", "output": ""}]}
    with make_pool(FunctionSpec("code", "flowrl.rewards.code:score", options), workers=1, timeout_s=8) as pool:
        future, found = pool.submit("code", row), False
        while not future.done():
            found = found or any(tmp_path.rglob("flowrl-code-*/tmp*"))
            time.sleep(0.01)
        assert found and future.result().failure == "timeout"
    assert list(tmp_path.iterdir()) == []
