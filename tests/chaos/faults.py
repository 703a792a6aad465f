"""The faults: what they do, when they happen, and which facts the report of each must contain."""

import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.misbehavior import MISBEHAVIOR
from tests.chaos.variants import (
    CALL_TIMEOUT_S,
    ENVIRONMENT_TIMEOUT_S,
    EPISODES,
    REWARD_TIMEOUT_S,
    ROLES,
    SCHEDULES,
    VLLM_EPISODES,
    get_roles,
)
from tests.chaos.workers import EVALUATION

PHASES: dict[str, tuple[tuple[str, str], ...]] = {
    "start": tuple((role, "__init__") for role in ROLES),
    "generation": (("rollout", "generate"), ("rollout", "poll")),
    "update": (("actor", "update"), ("critic", "update")),
    "weight_sync": (("actor", "weights"), ("rollout", "load_weights")),
    "evaluation": (("rollout", EVALUATION), ("reward", EVALUATION)),
    "checkpoint": (("actor", "save_checkpoint"), ("critic", "save_checkpoint"), ("actor", "checkpoint_saved")),
    "any": (),
}
"""Phase -> (role, method) pairs. The phase lasts while one of them runs; `any` is a random time."""

PROCESS_FAULTS = ("kill", "stop")
DRIVER, DISK = "driver", "disk"

RAY_PROCESSES = {"raylet": "raylet", "gcs": "gcs_server"}
"""Target -> name of the process of Ray."""

CHILDREN = {"scoring_process": "reward", "environment_process": "environment"}
"""Target -> the role whose workers start such processes."""

FUNCTION = "scoring_process"
"""Target of the misbehavior of a reward function."""


@dataclass(frozen=True)
class Case:
    """A fault, its target, and the phase and the run in which it happens."""

    schedule: str
    engine: str
    fault: str
    target: str
    """A role, one of `CHILDREN` or `RAY_PROCESSES`, or `driver` or `disk`."""
    phase: str

    @property
    def name(self) -> str:
        return f"{self.schedule}-{self.engine}-{self.target}-{self.fault}-{self.phase}"

    @property
    def variant(self) -> tuple[str, str]:
        return self.schedule, self.engine

    @property
    def is_hang(self) -> bool:
        return self.fault in ("stop", "hangs", "hangs_always", "prints")

    @property
    def timeout_s(self) -> float:
        """Seconds after which a hang is detected; 0 for other faults."""
        if not self.is_hang:
            return 0.0
        if self.target == "environment_process":
            return ENVIRONMENT_TIMEOUT_S
        return REWARD_TIMEOUT_S if self.target == "scoring_process" else CALL_TIMEOUT_S

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Allowed exit codes of a program that ends because of the fault; see the table in docs/failures.md."""
        return (2,) if self.ends_run else ()

    @property
    def ends_run(self) -> bool:
        """Whether the program may end with an error instead of continuing, because a user must fix the cause.

        With `on_failure: stop`, this includes each failure of a reward function or an environment.
        """
        is_lost_call = self.target in CHILDREN and self.fault in PROCESS_FAULTS
        return self.target == DISK or is_lost_call or self.fault in MISBEHAVIOR


TARGETS: dict[str, tuple[str, ...]] = {
    "hf": (DRIVER, *RAY_PROCESSES, *get_roles("hf"), "scoring_process"),
    "vllm": ("rollout",),
    "fsdp": ("actor",),
    EPISODES: ("rollout", "environment", "environment_process"),
    VLLM_EPISODES: ("rollout", "environment", "environment_process"),
}
"""Engine -> targets of signals."""


def all_cases() -> list[Case]:
    """Returns every combination of fault, target, phase, schedule and engine that is possible."""
    cases = []
    for schedule in SCHEDULES:
        for engine, targets in TARGETS.items():
            for phase in PHASES:
                own = [target for target in targets if phase != "start" or target not in CHILDREN]
                cases += [Case(schedule, engine, "kill", target, phase) for target in own]
                if phase != "start":
                    stopped = [target for target in own if target not in (DRIVER, *RAY_PROCESSES)]
                    cases += [Case(schedule, engine, "stop", target, phase) for target in stopped]
        cases += [Case(schedule, "hf", fault, FUNCTION, "any") for fault in MISBEHAVIOR]
        cases += [Case(schedule, "hf", "full", DISK, "any")]
    return cases


Finder = Callable[[str], bool]


def _pattern(pattern: str) -> Finder:
    return lambda report: re.search(pattern, report, re.IGNORECASE) is not None


_FUNCTION = r"tests\.chaos\.misbehavior:score|\bscore \(|chaos/misbehavior\.py"
"""The user's function, by its setting or by its frame in a stack."""

REQUIRED: dict[str, tuple[str, ...]] = {
    "stop": (r"deadline",),
    "raises": (_FUNCTION, r"RuntimeError", r"refused 10 connections"),
    "nan": (_FUNCTION, r"\bnan\b"),
    "string": (_FUNCTION, r"0\.5 points"),
    "hangs": (_FUNCTION, r"in hang \(", r"within 6 s", r"timeout_s"),
    "hangs_always": (_FUNCTION, r"in hang \(", r"within 6 s", r"timeout_s"),
    "prints": (_FUNCTION, r"printed more than 1 MiB", r"timeout_s"),
    "killed": (_FUNCTION, r"SIGKILL"),
    "sys_exit": (_FUNCTION, r"sys\.exit|SystemExit"),
    "os_exit": (_FUNCTION, r"(exit|code|status)\D{0,20}\b3\b"),
    "interrupt": (_FUNCTION, r"KeyboardInterrupt"),
    "huge": (r"reward", r"1e\+?308|overflow|finite"),
    "full": (r"disk is full|No space left",),
}
"""Fault -> patterns of facts that its report must contain."""


CHILD_FAULTS = {"kill": (r"SIGKILL",), "stop": (r"within \d s",)}
"""Facts of the report of a killed or stopped child process. A loss between two calls needs no report."""

CHILD_CODE = {"scoring_process": _FUNCTION, "environment_process": r"tests\.recipes\.turns:TwoTurns"}


def is_about(case: Case, line: str) -> bool:
    """Returns whether a message may report the fault. Messages about other roles may belong to an earlier fault, after
    which a killed child process may need no report.
    """
    if case.target not in CHILDREN or case.fault not in PROCESS_FAULTS:
        return True
    return re.search(rf"\b{CHILDREN[case.target]}\b|{CHILD_CODE[case.target]}", line) is not None


def missing_facts(case: Case, rank: int, report: str) -> list[str]:
    """Returns the patterns of required facts that the report does not contain."""
    patterns = REQUIRED.get(case.fault, ())
    if case.target in CHILDREN and case.fault in PROCESS_FAULTS:
        patterns = (CHILD_CODE[case.target], *CHILD_FAULTS[case.fault]) if report else ()
    elif case.fault == "kill" and case.target == DRIVER:
        patterns = (r"resuming from step|starting",)
    elif case.target in RAY_PROCESSES:
        patterns = (rf"Ray's {RAY_PROCESSES[case.target]}\b", r"SIGKILL|signal 9")
    elif case.fault == "kill":
        patterns = (rf"\b{case.target}\b", rf"rank {rank}\b", r"SIGKILL|signal 9")
    elif case.fault == "stop":
        patterns = (rf"\b{case.target}\b", rf"rank {rank}\b", *patterns)
    return [pattern for pattern in patterns if not _pattern(pattern)(report)]


def wrong_facts(case: Case, report: str) -> list[str]:
    """Returns statements of the report that name a wrong cause."""
    wrong = r"out of memory|lack of memory" if case.is_hang or case.fault in MISBEHAVIOR else r"deadline"
    if case.target == DISK:
        wrong = r"out of memory|deadline"
    if case.target in RAY_PROCESSES:
        wrong = r"exit code|deadline|lost its process|replacing"
    return re.findall(wrong, report)


def send_signal(process_id: int, fault: str) -> None:
    os.kill(process_id, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def request_misbehavior(folder: Path, fault: str) -> None:
    """Makes the next call of the reward function misbehave."""
    (folder / "misbehaved").unlink(missing_ok=True)
    (folder / "reward.new").write_text(fault)
    (folder / "reward.new").rename(folder / "reward")


def fill_disk(folder: Path) -> Path:
    """Fills the file system of `folder`; returns the file to remove."""
    filler = folder / "filler"
    chunk = b"\0" * (1 << 16)
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(chunk)
        except OSError:
            chunk = b"\0" * 512
        try:
            while True:
                file.write(chunk)
        except OSError:
            return filler


def draw_cases(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """Returns `count` cases in random order, each as often as the others, with the cases of one run together."""
    generator = random.Random(seed)
    drawn: list[Case] = []
    while len(drawn) < count:
        drawn += generator.sample(cases, min(len(cases), count - len(drawn)))
    variants = list(dict.fromkeys(case.variant for case in drawn))
    return sorted(drawn, key=lambda case: variants.index(case.variant))
