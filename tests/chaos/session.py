"""Injects faults into a run, one after another, and judges each: numbers, cause, times and leftovers."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_folder import RunFolder
from flowrl.report.rollout_log import read_rows, saved_steps
from tests.chaos.faults import (
    CHILDREN,
    DISK,
    DRIVER,
    PHASES,
    PROCESS_FAULTS,
    RAY_PROCESSES,
    Case,
    fill_disk,
    is_about,
    missing_facts,
    request_misbehavior,
    send_signal,
    wrong_facts,
)
from tests.chaos.program import Program, last_step
from tests.chaos.variants import read_metrics, variant_config, write_config
from tests.chaos.workers import BETWEEN_CALLS

PROGRESS_STEPS = 3
"""A run progresses when it has recorded this number of steps more than at the event. The driver has submitted at most
two of them before the event.
"""
PHASE_WAIT_S, STABLE_WAIT_S, LIMIT_S = 120.0, 400.0, 500.0
MAX_DELAY_S, MAX_RANDOM_S = 0.02, 1.5
REPORT_S = 5.0
REPORT_WAIT_S = 25.0
INTERRUPTED = 130
"""Exit code of a run that SIGINT has ended."""
EVALUATION_METRICS = ("accuracy", "evaluation/")
DISK_MB = 128

PROGRESS = re.compile(
    r"^(training \d|starting |optimizer updates|resuming from step|baseline eval|results: |health: step |[^\x00-\x7f])"
    r"|the replacement has taken over$"
)
"""Lines of flowrl that report no failure. A replacement may take over after the next fault."""
FOREIGN = re.compile(r"Loading weights|Writing model shards|it/s\]|\(raylet\)|\.cc:\d+: ")
"""Lines that flowrl does not print. Ray's C++ code in the driver prints its errors with file and line."""


@dataclass
class Result:
    """A row of the results."""

    commit: str
    date: str
    case: str
    seed: int
    outcome: str
    """`continued`, `ended CODE` (the program ended with an error and was resumed), `resumed` (after a killed driver) or
    `stuck`.
    """
    during: str
    """Method that the target executed at the event."""
    cause: str
    """The cause as reported."""
    report_s: float | None
    """Seconds from the event, or from the deadline of a hang, to the report."""
    progress_s: float | None
    """Seconds from the event, or from the start of the program that resumes, to the third step after the event."""
    leftovers: list[str] | None
    """Leftover processes and files, in the row of the last fault of a program. None if its end was not checked."""
    numbers: bool | None
    missing: list[str]
    """Patterns of facts that the report lacks, and statements of a wrong cause."""
    load: float
    """Processes that wanted to run per CPU of the machine, at the event."""
    steps: tuple[int, int] = field(default=(0, 0), repr=False)
    """Last recorded step at the event and when the fault was judged."""

    @property
    def correct(self) -> bool:
        is_alive = self.outcome != "stuck" and not self.outcome.startswith("unexpected")
        return is_alive and self.numbers is True and not self.missing and not self.leftovers

    def as_row(self) -> dict[str, Any]:  # Any: the values of the fields
        return asdict(self) | {"correct": self.correct}


class SessionError(Exception):
    """Raised if the run of a session does not start, or no fault can be injected into it."""


class Session:
    """A run into which faults are injected. `folder` must have a short path, because Ray creates sockets in it."""

    def __init__(
        self, folder: Path, task: Path, schedule: str, engine: str, steps: int, seed: int, commit: str, on_disk: bool
    ) -> None:
        self.folder, self.schedule, self.steps, self.seed, self.commit = folder, schedule, steps, seed, commit
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)
        if on_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(self.disk)], check=True)
        self.is_mounted = on_disk
        self.output = self.disk / "run"
        self.config = variant_config(task, self.output, schedule, engine, steps, records=folder)
        self._config_path = write_config(self.config, folder / "config.yaml")
        self._random = random.Random(seed)
        self.program = Program(folder, self._config_path)
        self.results: list[Result] = []
        self._entries_of_killed: set[str] = set()

    # The run.

    def _wait(self, condition: Callable[[], bool], limit_s: float, poll_s: float = 0.05) -> bool:
        """Waits until the condition holds or the program ends. Returns whether the condition holds."""
        deadline = time.monotonic() + limit_s
        while not (holds := condition()) and time.monotonic() < deadline and self.program.code is None:
            time.sleep(poll_s)
        return holds or condition()

    def prepare(self, case: Case) -> None:
        """Waits until one more step is recorded. Starts the program again for a fault during the start.

        Raises SessionError if the program ends instead.
        """
        if case.phase == "start":
            if last_step(self.output) >= 0:
                self.program.kill()
                self._start_program()
            return
        step = last_step(self.output)
        if not self._wait(lambda: last_step(self.output) > max(step, 0), STABLE_WAIT_S):
            raise SessionError(f"the run stays at step {step}: {self._tail()}")

    def remaining_steps(self) -> int:
        return self.steps - max(0, last_step(self.output))

    def _tail(self) -> str:
        return " | ".join(line for _, line in self.program.lines[-5:])

    def _end_program(self, killed: bool) -> list[str]:
        """Waits for the end of all processes, and returns what is left of the program."""
        left = self.program.wait_for_end()
        for result in self.results:
            result.leftovers = result.leftovers or []
        if killed:
            self._entries_of_killed = self.program.temporary_entries()
            return left
        entries = sorted(self.program.temporary_entries())
        self.program.remove_temporary_entries()
        hidden = [f"output/{path.name}" for path in self.output.glob(".*")] if self.output.exists() else []
        return left + entries + hidden

    def _start_program(self) -> None:
        self.program = Program(self.folder, self._config_path)

    # Faults.

    def take(self, case: Case) -> Result | None:
        """Injects the fault of a case and judges it. Returns None if its phase does not occur before the run ends."""
        self._clear_request()
        victim = self._wait_for_phase(case)
        if victim is None:
            return None
        rank, process_id, during = victim
        step, load = last_step(self.output), os.getloadavg()[0] / (os.cpu_count() or 1)
        filler: Path | None = None
        event_s: float | None = time.monotonic()
        if case.target == DISK:
            filler = fill_disk(self.disk)
        elif case.fault in PROCESS_FAULTS:
            try:
                send_signal(process_id, case.fault)
            except ProcessLookupError:
                return None
        else:
            event_s = self._misbehave(case.fault)
            if event_s is None:
                return None
        result = self._observe(case, rank, step, event_s or time.monotonic(), filler)
        result.during, result.load, result.seed = during, round(load, 1), self.seed
        # The process is reported before it is killed.
        if case.fault == "stop" and not self._wait(lambda: not _is_alive(process_id), REPORT_S):
            result.leftovers = [*(result.leftovers or []), f"stopped process of {case.target}"]
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        self.results.append(result)
        return result

    def _clear_request(self) -> None:
        (self.folder / "reward").unlink(missing_ok=True)

    def _wait_for_phase(self, case: Case) -> tuple[int, int, str] | None:
        """Returns rank, process id and current method of the target, in the phase of the case. The method of a scoring
        process is empty.
        """
        methods, found = set(PHASES[case.phase]), False

        def is_in_phase() -> bool:
            nonlocal found
            current = self.program.current_methods()
            if case.phase == "start":
                found = any(role == case.target or case.target in (DRIVER, *RAY_PROCESSES) for role, _ in current)
            else:
                found = any((role, method) in methods for (role, _), (_, method) in current.items())
            return found

        if case.phase == "any":
            time.sleep(self._random.uniform(0, MAX_RANDOM_S))
        elif not self._wait(is_in_phase, PHASE_WAIT_S, poll_s=0.004):
            return None
        time.sleep(self._random.uniform(0, MAX_DELAY_S))
        if case.target in (DRIVER, DISK):
            return 0, self.program.process.pid, ""
        if case.target in RAY_PROCESSES:
            return 0, self.program.ray_process(RAY_PROCESSES[case.target]), ""
        current, target = self.program.current_methods(), CHILDREN.get(case.target, case.target)
        ranks = sorted(rank for role, rank in current if role == target)
        if not ranks:
            return None
        rank = self._random.choice(ranks)
        process_id, method = current[target, rank]
        if case.target in CHILDREN:
            children = self.program.scoring_processes(process_id)
            return (rank, self._random.choice(children), "") if children else None
        return rank, process_id, "" if method == BETWEEN_CALLS else method

    def _misbehave(self, fault: str) -> float | None:
        """Requests a misbehavior of the reward; returns the time at which it happened."""
        record = self.folder / "misbehaved"
        request_misbehavior(self.folder, fault)
        if not self._wait(record.exists, PHASE_WAIT_S):
            return None
        return float(record.read_text().split()[0])

    # The judgement.

    def _observe(self, case: Case, rank: int, step: int, event_s: float, filler: Path | None) -> Result:
        """Waits until the run has progressed or ended, resumes an ended run, and judges the result."""
        target = min(step + PROGRESS_STEPS, self.steps)
        has_progressed = self._wait(lambda: last_step(self.output) >= target, LIMIT_S)
        progress_s: float | None = time.monotonic() - event_s
        self._wait_for_report(case, event_s)
        program, code = self.program, self.program.code
        leftovers: list[str] | None = None
        is_driver_killed = case.target == DRIVER
        if has_progressed and not is_driver_killed:
            outcome = "continued"
        elif code is None:
            outcome, progress_s = "stuck", None
            self.program.kill()
        else:
            leftovers = self._end_program(killed=is_driver_killed)
            outcome = "resumed" if is_driver_killed else f"ended {code}"
            if not is_driver_killed and code not in case.exit_codes:
                outcome = f"unexpected end {code}"
            if filler is not None:
                filler.unlink()
            self._clear_request()
            self._start_program()
            progress_s = None
            if self._wait(lambda: last_step(self.output) >= target, LIMIT_S):
                progress_s = time.monotonic() - self.program.started_s
            else:
                outcome = "stuck"
            if is_driver_killed:
                leftovers += sorted(self._entries_of_killed & self.program.temporary_entries())
        reported_s, cause = _find_report(program, event_s, case)
        missing: list[str] = []
        if is_driver_killed:
            reported_s, cause = None, ""
        else:
            missing = missing_facts(case, rank, cause) + wrong_facts(case, cause)
        if sum(len(line) for _, line in program.output_since(event_s)) > 100_000:
            missing = [*missing, "short output"]
        return Result(
            commit=self.commit,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            case=case.name,
            seed=0,
            outcome=outcome,
            during="",
            cause=cause[:400],
            report_s=None if reported_s is None else round(reported_s - event_s - case.timeout_s, 2),
            progress_s=None if progress_s is None else round(progress_s, 1),
            leftovers=leftovers,
            numbers=None if self.schedule == "async" else self.has_reference_numbers(),
            missing=missing,
            load=0.0,
            steps=(step, last_step(self.output)),
        )

    def _wait_for_report(self, case: Case, event_s: float) -> None:
        """Waits for the report of a stopped or killed process.

        Until the deadline of the stopped call, or the next call of the killed process, the run may progress with
        buffered rows and other processes.
        """
        if case.fault == "kill" and case.target in CHILDREN:
            return  # between two calls, it is replaced without a report
        if case.fault in PROCESS_FAULTS:
            limit_s = event_s + case.timeout_s + REPORT_WAIT_S - time.monotonic()
            self._wait(lambda: _find_report(self.program, event_s, case)[0] is not None, limit_s)

    reference: list[dict[str, float]]
    """Log records of the undisturbed run."""

    def has_reference_numbers(self) -> bool:
        """Whether all records so far are bitwise identical to the undisturbed run."""
        return find_difference(read_metrics(self.output), self.reference) is None

    def finish(self) -> None:
        """Ends the run and judges what only the end of the run shows: exit code, leftovers, prompts of async runs."""
        if self.schedule == "async" and self.program.code is None:
            self._wait(lambda: False, LIMIT_S)
        elif self.program.code is None:
            self.program.process.send_signal(signal.SIGINT)
            self._wait(lambda: False, LIMIT_S)
        code = self.program.code
        if code is None:
            self.program.kill()
        left = self._end_program(killed=False)
        if not self.results:
            return
        last = self.results[-1]
        last.leftovers = [*(last.leftovers or []), *left]
        if code not in (0, INTERRUPTED):
            last.outcome = f"unexpected end {code} after {last.outcome}"
        if self.schedule == "async":
            self._judge_prompts()
        elif difference := find_difference(
            read_metrics(self.output), self.reference, is_interrupted=code == INTERRUPTED
        ):
            last.numbers = False
            sys.stderr.write(f"{last.case}: {difference}\n")

    def abort(self) -> None:
        """Ends a run that does not progress or ended by itself, which the last fault may have caused."""
        self.program.kill()
        if self.results:
            self.results[-1].outcome = f"unexpected end after {self.results[-1].outcome}"

    def _judge_prompts(self) -> None:
        """Every prompt is trained once, or it is counted as dropped."""
        by_step = read_prompt_ids(RunFolder(self.output).rollouts)
        wrong = find_wrong_steps(by_step, self.steps, self.config.prompts_per_step, self._num_dropped())
        for result in self.results:
            result.numbers = not any(result.steps[0] < step <= result.steps[1] for step in wrong)
        if any(not any(r.steps[0] < step <= r.steps[1] for r in self.results) for step in wrong):
            self.results[-1].numbers = False

    def _num_dropped(self) -> int:
        with suppress(FileNotFoundError):
            return sum(json.loads((self.output / "summary.json").read_text())["groups"]["dropped"].values())
        return 0

    def close(self) -> None:
        if self.program.code is None:
            self.program.kill()
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.disk)], check=True)


def read_prompt_ids(rollouts: Path) -> dict[int, list[int]]:
    """Returns the prompts of each trained step. A step that was repeated after a restart has the prompts of its last
    repetition.
    """
    return {
        step: [row["prompt_id"] for row in read_rows(rollouts, "training", step)]
        for step in saved_steps(rollouts, "training")
    }


def find_difference(
    records: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]], *, is_interrupted: bool = False
) -> str | None:
    """Returns the first difference of log records from those of the undisturbed run; None if there is none.

    The last record of an interrupted run may lack the metrics in `EVALUATION_METRICS`, because a signal skips the
    evaluation of its step.
    """
    if not records:
        return "there are no records"
    if len(records) > len(reference):
        return f"there are {len(records)} records instead of {len(reference)}"
    for index, (record, expected) in enumerate(zip(records, reference, strict=False)):
        missing = expected.keys() - record.keys()
        if is_interrupted and index == len(records) - 1:
            missing = {name for name in missing if not name.startswith(EVALUATION_METRICS)}
        for name in sorted({*record, *missing}):
            if record.get(name) != expected.get(name):
                return f"step {expected['step']}: {name} is {record.get(name)} instead of {expected.get(name)}"
    return None


def find_wrong_steps(by_step: dict[int, list[int]], steps: int, num_prompts: int, num_dropped: int) -> set[int]:
    """Returns the steps whose prompts were trained twice, are too few or too many, or are missing without being
    counted as dropped.
    """
    trained = Counter(prompt for prompts in by_step.values() for prompt in prompts)
    wrong = {
        step
        for step, prompts in by_step.items()
        if len(prompts) != num_prompts or any(trained[prompt] > 1 for prompt in prompts)
    }
    missing = set(range(1, steps + 1)) - by_step.keys()
    expected = set(range(steps * num_prompts))
    lost = sorted(expected - trained.keys())
    if len(lost) > num_dropped:
        wrong |= {prompt // num_prompts + 1 for prompt in lost}
    return wrong | missing


def _find_report(program: Program, event_s: float, case: Case) -> tuple[float | None, str]:
    """Returns the time of the first message after the event that may report the fault, and all such messages."""
    messages = [
        (at_s, line)
        for at_s, line in program.output_since(event_s)
        if line.strip() and not PROGRESS.search(line) and not FOREIGN.search(line) and is_about(case, line)
    ]
    if not messages:
        return None, ""
    return messages[0][0], " / ".join(line.strip() for _, line in messages)


def _is_alive(process_id: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False
