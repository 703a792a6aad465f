"""A host runs episodes in other processes. What an episode does costs only this episode, and no process is left."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flowrl.environments.base import ModelResponse
from flowrl.environments.environment_host import EnvironmentHost
from flowrl.environments.requests import Close, EnvironmentLimits, EnvironmentSpec, Reply, Reset, Step
from flowrl.rewards.pool import PoolLimits, ScoringPool
from tests.rewards.test_pool import MARK, mark, marked_processes, private, skip_without
from tests.slow_cases import slow

__all__ = ["mark", "private"]

ROOT = Path(__file__).parents[2]
FOLDER = "tests.environments.episodes"
SYNC, ASYNC = f"{FOLDER}:Game", f"{FOLDER}:AsyncGame"


@dataclass
class Played:
    """An episode that has ended."""

    failure: str | None = None
    message: str = ""
    reward: float = 0.0
    reasons: list[str] = field(default_factory=list)
    num_starts: int = 1


def make_host(name: str, options: dict[str, Any] | None = None, **limits: Any) -> EnvironmentHost:
    settings = {"workers": 1, "timeout_s": 60.0, "max_timeouts": 1, **limits}
    return EnvironmentHost(EnvironmentSpec(name, options or {}), EnvironmentLimits(environment=(MARK,), **settings))


def ask(host: EnvironmentHost, request: Reset | Step | Close) -> Reply:
    return host.submit(request).result(timeout=200)


def play(host: EnvironmentHost, episode: int, kind: str) -> Played:
    """Plays an episode, and starts it again while it is lost."""
    played = Played(num_starts=0)
    reply = Reply(failure="lost")
    while reply.failure == "lost" and played.num_starts < 6:
        played.num_starts += 1
        reply = ask(host, Reset(episode, {"kind": kind}))
        turn = 0
        while reply.failure is None and not (reply.observation and reply.observation.done):
            reply = ask(host, Step(episode, ModelResponse("text", [1], "stop", turn)))
            turn += 1
            if reply.observation is not None:
                played.reward += reply.observation.reward or 0.0
                played.reasons += [reply.observation.info["reason"]] if "reason" in reply.observation.info else []
    ask(host, Close(episode))
    played.failure, played.message = reply.failure, reply.message
    return played


def play_all(host: EnvironmentHost, kinds: Sequence[str]) -> list[Played]:
    """Plays episodes at the same time."""
    results: list[Played] = [Played() for _ in kinds]

    def run(index: int) -> None:
        results[index] = play(host, index, kinds[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


RAISED = ("exception", "system_exit", "keyboard_interrupt", "unprintable", "long_message", "surrogates", "recursion")
INVALID = (
    "none", "nan", "text", "complex", "no_number", "no_messages", "no_role", "no_content", "nan_reward", "text_reward",
    "object_info", "circular_info", "large_message", "number_messages",
)  # fmt: skip
ENDED = {"exit": "exited", "kill": "killed", "terminate": "killed", "segfault": "killed", "abort": "killed"}
CORRUPT = ("garbage", "long_frame", "nested_frame", "forged_score")
HARMLESS = ("daemon", "thread", "program", "fork_and_return", "close_output")
CASES = [
    *((name, kind, "raised") for name in (SYNC, ASYNC) for kind in RAISED),
    *((SYNC, kind, "invalid") for kind in INVALID),
    *((name, kind, failure) for name in (SYNC, ASYNC) for kind, failure in ENDED.items()),
    *((ASYNC, kind, "corrupt") for kind in CORRUPT),
    *((name, "print", "output") for name in (SYNC, ASYNC)),
    (ASYNC, "cancelled", "raised"),
    (SYNC, "exception@reset", "raised"),
    (SYNC, "kill@reset", "killed"),
]
FAST = {
    (SYNC, "exception"), (SYNC, "nan_reward"), (SYNC, "segfault"), (ASYNC, "exit"), (ASYNC, "garbage"),
}  # fmt: skip
"""Cases that are no slow tests, because all cases take minutes together."""


@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    ("name", "kind", "failure"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[:2] not in FAST)) for case in CASES],
    ids=lambda value: str(value).rpartition(":")[2],
)
def test_an_episode_that_misbehaves_fails_alone(name: str, kind: str, failure: str) -> None:
    with make_host(name, timeout_s=5.0) as host:
        bad, *others = play_all(host, [kind, "", "", ""])
    assert bad.failure == failure, bad.message
    assert [other.failure for other in others] == [None] * 3
    assert [other.reward for other in others] == [1.0] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize("name", [SYNC, ASYNC], ids=["sync", "async"])
def test_episodes_that_leave_processes_or_fail_at_their_end_are_played(name: str) -> None:
    kinds = [*HARMLESS, "exception@close", "system_exit@close", ""]
    with make_host(name) as host:
        played = play_all(host, kinds)
    failures = {kind: episode.failure for kind, episode in zip(kinds, played, strict=True)}
    assert failures == dict.fromkeys(kinds)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_an_episode_that_exceeds_its_memory_fails_alone() -> None:
    """The other episode starts before and continues afterwards, because both share the memory of the process."""
    with make_host(SYNC, memory_mb=3000.0, threads=4) as host:
        started = ask(host, Reset(1, {"kind": ""}))
        bad = play(host, 0, "memory")
        continued = ask(host, Step(1, ModelResponse("text", [1], "stop")))
    assert (started.failure, bad.failure, continued.failure) == (None, "memory", None)


@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    ("name", "kind", "failure"),
    [
        slow(SYNC, "hang", "timeout"),
        slow(SYNC, "loop", "timeout"),
        slow(ASYNC, "not_cancelled", "timeout"),
        (SYNC, "slow", None),
    ],
)
def test_a_late_step_is_observed_and_the_next_one_waits_for_it(name: str, kind: str, failure: str | None) -> None:
    with make_host(name, timeout_s=1.0) as host:
        played = play(host, 0, kind)
    assert (played.failure, played.reasons) == (failure, ["timeout"])


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_a_late_async_step_is_canceled_and_the_episode_continues() -> None:
    with make_host(ASYNC, timeout_s=0.5) as host:
        played = play(host, 0, "async_hang")
        assert (played.failure, played.reward, played.reasons) == (None, 1.0, ["timeout"])
        ask(host, Reset(1, {"kind": "async_hang"}))
        reply = ask(host, Step(1, ModelResponse("a")))
    assert reply.observation is not None and reply.observation.messages[0]["role"] == "user"


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_the_message_about_a_timeout_has_the_first_role_of_the_observations() -> None:
    """The chat template is checked with the roles of observations only."""
    with make_host(f"{FOLDER}:ToolGame", timeout_s=0.5) as host:
        ask(host, Reset(0, {"kind": "async_hang"}))
        reply = ask(host, Step(0, ModelResponse("a")))
    assert reply.observation is not None and reply.observation.info["reason"] == "timeout"
    assert [message["role"] for message in reply.observation.messages] == ["tool"]


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_a_late_step_fails_if_the_limits_say_so() -> None:
    with make_host(ASYNC, timeout_s=0.5, on_timeout="fail") as host:
        assert play(host, 0, "async_hang").failure == "timeout"


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize("kind", ["hang", "loop"])
def test_an_episode_that_blocks_the_event_loop_is_named_and_others_are_lost(kind: str) -> None:
    with make_host(ASYNC, timeout_s=1.0) as host:
        ask(host, Reset(1, {}))
        bad = play(host, 0, kind)
        assert ask(host, Step(1, ModelResponse("a"))).failure == "lost"
        assert play(host, 1, "").failure is None
    assert (bad.failure, bad.num_starts) == ("timeout", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize("kind", ["native_hang", "stop"])
def test_an_episode_that_freezes_its_process_fails(kind: str) -> None:
    with make_host(SYNC, timeout_s=0.5) as host:
        bad, other = play_all(host, [kind, ""])
    assert (bad.failure, other.failure) == ("timeout", None)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_a_step_that_hangs_at_close_or_reset_does_not_delay_others() -> None:
    with make_host(SYNC, timeout_s=0.5) as host:
        assert [p.failure for p in play_all(host, ["hang@reset", "hang@close", ""])] == ["timeout", None, None]


@pytest.mark.usefixtures("mark")
def test_killed_processes_are_replaced_and_their_episodes_are_lost(mark: str) -> None:
    with make_host(ASYNC, workers=2) as host:
        for episode in range(8):
            assert ask(host, Reset(episode, {})).failure is None
        for process in marked_processes(mark):
            if [child for child in process.children() if child.status() != "zombie"] == []:
                os.kill(process.pid, signal.SIGKILL)
        replies = [ask(host, Step(episode, ModelResponse("a"))) for episode in range(8)]
        assert {reply.failure for reply in replies} == {"lost"}
        assert [played.failure for played in play_all(host, [""] * 8)] == [None] * 8


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_many_hanging_threads_retire_their_process() -> None:
    with make_host(SYNC, timeout_s=0.3, threads=4, max_timeouts=0) as host:
        played = play_all(host, ["hang"] * 6)
        assert {episode.failure for episode in played} <= {"timeout", "lost"}
        assert play(host, 9, "").failure is None


@pytest.mark.usefixtures("mark")
def test_each_environment_is_closed_once(tmp_path: Path) -> None:
    with make_host(SYNC, {"folder": str(tmp_path)}) as host:
        play_all(host, ["", "", "exception"])
        ask(host, Reset("again", {}))
        ask(host, Reset("again", {}))
        ask(host, Close("again"))
        assert ask(host, Close("unknown")).failure is None
    assert (tmp_path / "closed").read_text() == "x" * 5


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_an_episode_can_be_closed_during_a_step() -> None:
    with make_host(ASYNC, {"wait_s": 30.0}) as host:
        ask(host, Reset(0, {}))
        step = host.submit(Step(0, ModelResponse("a")))
        assert ask(host, Close(0)).failure is None
        assert step.result(timeout=60).failure == "closed"


@pytest.mark.usefixtures("mark")
def test_reset_returns_messages_or_tokens() -> None:
    with make_host(ASYNC) as host:
        first, second = ask(host, Reset(0, {"prompt": "p"})), ask(host, Reset(1, {"kind": "tokens"}))
    assert first.observation is not None
    assert (first.observation.messages, first.prompt_ids) == (({"role": "user", "content": "p"},), None)
    assert second.prompt_ids == (1, 2, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_an_invalid_start_fails() -> None:
    starts = [None, "text", [], [{}], [-1], [1.5], {"role": "user"}]
    with make_host(f"{FOLDER}:BadStart") as host:
        failures = [ask(host, Reset(episode, {"start": start})).failure for episode, start in enumerate(starts)]
    assert failures == ["invalid"] * len(starts)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("no_module:A", "not_loaded"),
        slow(f"{FOLDER}:Nothing", "not_loaded"),
        slow(f"{FOLDER}:bad_constructor", "raised"),
    ],
)
def test_a_class_that_cannot_be_created_fails_the_episode(name: str, failure: str) -> None:
    with make_host(name) as host:
        assert ask(host, Reset(0, {})).failure == failure


@pytest.mark.usefixtures("mark")
def test_an_import_that_is_killed_once_costs_no_episode(tmp_path: Path) -> None:
    """A program outside may have killed the process. The episode is lost, and starts again."""
    code = (
        "import os, pathlib\n"
        f"file = pathlib.Path({str(tmp_path / 'killed')!r})\n"
        "if not file.exists():\n    file.touch()\n    os.kill(os.getpid(), 9)\n"
        f"from {FOLDER} import Game as make\n"
    )
    (tmp_path / "module.py").write_text(code)
    with make_host(f"{tmp_path}/module.py:make") as host:
        played = play(host, 0, "")
    assert (played.failure, played.num_starts) == (None, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("raise SystemExit", "not_loaded"),
        ("import os; os._exit(1)", "not_loaded"),
        ("import time; time.sleep(600)", "timeout"),
    ],
)
def test_an_import_that_ends_or_hangs_fails_the_episodes(code: str, failure: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(f"{code}\ndef make(): pass")
    with make_host(f"{tmp_path}/module.py:make", load_timeout_s=0.5) as host:
        assert play(host, 0, "").failure == failure


@pytest.mark.usefixtures("mark")
def test_a_row_without_json_fails() -> None:
    with make_host(SYNC) as host:
        assert ask(host, Reset(0, {"kind": object()})).failure == "invalid"


@pytest.mark.usefixtures("mark")
def test_a_closed_host_fails_its_episodes() -> None:
    host = make_host(ASYNC, {"wait_s": 30.0})
    ask(host, Reset(0, {}))
    step = host.submit(Step(0, ModelResponse("a")))
    host.close()
    host.close()
    assert step.result(timeout=1).failure == "closed"
    with pytest.raises(RuntimeError):
        host.submit(Close(0))


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_a_host_that_is_killed_leaves_no_process(mark: str) -> None:
    program = (
        "from tests.environments.test_environment_host import ModelResponse, Reset, Step, ask, make_host\n"
        f"host = make_host({SYNC!r}, {{'wait_s': 600.0}})\n"
        "ask(host, Reset(0, {}))\nhost.submit(Step(0, ModelResponse('a')))\nprint('ready', flush=True)\n"
        "import time; time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == b"ready\n"
        assert len(marked_processes(mark)) >= 3
        process.kill()


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError):
        EnvironmentHost(EnvironmentSpec(SYNC), EnvironmentLimits(workers=0))


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_private_folders_cannot_be_reached(private: Path) -> None:
    with make_host("tests.user_code.attacks:Intruder") as host:
        skip_without("private_folders", host.find_missing_protections())
        reply = ask(host, Reset(1, {"prompt": str(private)}))
        assert reply.observation is not None and reply.observation.messages[0]["content"] == ""


@pytest.mark.usefixtures("mark")
def test_missing_protections_are_those_of_reward_processes() -> None:
    limits = PoolLimits(workers=1, timeout_s=None)
    with make_host(ASYNC) as host, ScoringPool([], limits) as pool:
        assert host.find_missing_protections() == host.unavailable == pool.find_missing_protections()
        assert ask(host, Reset(1, {})).failure is None
    with make_host(f"{FOLDER}:Missing") as host:
        assert ask(host, Reset(1, {})).failure == "not_loaded"
        assert isinstance(host.find_missing_protections(), tuple)  # returns, although no process can start
