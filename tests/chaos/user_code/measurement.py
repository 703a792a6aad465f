"""Runs one kind of misbehavior after another, each in a short GRPO run, and compares it with undisturbed runs."""

import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from flowrl.report.rollout_log import read_rows, saved_steps
from recipes.grpo.config import GRPOConfig
from tests.calling_policy import call_of, save_calling_policy
from tests.chaos.runs import commit_name
from tests.chaos.user_code.forked_run import call_in_fork, run_forked
from tests.chaos.user_code.misbehaving_code import is_chosen
from tests.chaos.user_code.misbehavior_kinds import (
    MAX_FAILURE_RATE,
    MEMORY_MB,
    REWARD_TIMEOUT_S,
    STEP_TIMEOUT_S,
    STEPS,
    TOOL_TIMEOUT_S,
    ZERO,
    Kind,
    Source,
)
from tests.chaos.variants import read_metrics, write_config
from tests.configs import NO_REPORT, quickstart_settings
from tests.small_task import prepare_small

CODE = "tests.chaos.user_code.misbehaving_code"
TOOLS = ("look_up", "look_up_async")
BATCH_SIZE, SAMPLES = 32, 4
LIMIT_S = 300.0
NUM_UNDISTURBED = 5
"""Number of the newest undisturbed runs with whose median time a run is compared. One precedes each run."""

DEPENDS_ON_FAULTS = ("environment/", "reward_failed_fraction", "rewards/", "turns")
"""Prefixes of metrics that state the failures."""


@dataclass
class Result:
    """A row of the results: what a run with a kind of misbehavior did."""

    commit: str
    date: str
    kind: str
    exit_code: int | None
    steps: int
    """Number of complete steps."""
    calls: int
    """Number of rows with a call that misbehaved, in complete steps."""
    lost: int
    """Number of failed rows in complete steps."""
    counted: dict[str, float]
    """Sums of the events of environments in complete steps."""
    cause: str
    """Cause of the first failed row, or the error that ended the run."""
    has_same_numbers: bool
    """Whether all metrics of the policy are bitwise identical to the undisturbed run."""
    connections: int
    """Number of connections to the server that the calls try to reach."""
    seconds: float
    seconds_lost: float | None
    """Seconds more than the median of the undisturbed runs before this run; None if the run ended early."""
    leftovers: list[str]
    """Processes, files, files in shared memory, and descriptors that were left."""
    load: float
    """Processes that wanted to run per CPU of the machine, at the start."""
    problems: list[str] = field(default_factory=list)

    def as_row(self) -> dict[str, Any]:  # Any: the values of the fields
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """The facts of one run."""

    exit_code: int | None
    seconds: float
    descriptors: Counter[str]
    leftovers: list[str]
    connections: int
    metrics: list[dict[str, float]]
    rows: list[Mapping[str, Any]]
    """Saved rows of all complete steps."""
    error: str


class Measurement:
    """Runs in temporary folders below `folder`, whose path must be short."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        call_in_fork(prepare_small, folder / "task")
        call_in_fork(save_calling_policy, folder / "calling", TOOLS)
        self._undisturbed: defaultdict[tuple[Source, str], list[Outcome]] = defaultdict(list)
        self._commit = commit_name()

    def measure(self, kind: Kind) -> Result:
        """Runs a kind of misbehavior, after an undisturbed run, and returns what the run did."""
        name = ZERO if kind.costs_row else ""
        if not self._undisturbed[kind.source, name]:
            self._run_undisturbed(kind.source, name)  # the first run is slower than later ones
        self._run_undisturbed(kind.source, name)
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        own, undisturbed = self._run(kind), self._undisturbed[kind.source, name]
        numbers, expected_numbers = map(_policy_metrics, (own.metrics, undisturbed[0].metrics))
        new = own.descriptors - undisturbed[0].descriptors
        undisturbed_s = median(run.seconds for run in undisturbed[1:][-NUM_UNDISTURBED:])
        result = Result(
            commit=self._commit,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            kind=kind.id,
            exit_code=own.exit_code,
            steps=max((int(line["step"]) for line in own.metrics), default=0),
            calls=sum(_misbehaves(kind, row) for row in own.rows),
            lost=round(sum(line["reward_failed_fraction"] for line in own.metrics if line["step"]) * BATCH_SIZE),
            counted=_sum_events(own.metrics),
            cause=next((text for row in own.rows for text in (row["reward_failures"] or {}).values()), own.error)[:300],
            has_same_numbers=numbers == expected_numbers[: len(numbers)],
            connections=own.connections,
            seconds=round(own.seconds, 1),
            seconds_lost=None if kind.exit_code else round(own.seconds - undisturbed_s, 1),
            leftovers=[*own.leftovers, *(f"descriptor {target}" for target in new.elements())],
            load=round(load, 1),
        )
        result.problems = list(_find_problems(kind, result, own.rows))
        return result

    def _run_undisturbed(self, source: Source, name: str) -> None:
        run = self._run(Kind(source, name, ""))
        assert run.exit_code == 0 and not run.leftovers, run
        self._undisturbed[source, name].append(run)

    def _run(self, kind: Kind) -> Outcome:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        unused = _unused_shared_memory()
        try:
            with socket.create_server(("127.0.0.1", 0)) as server:
                config = self._config(kind, folder, server.getsockname()[1])
                end = run_forked(folder, write_config(config, folder / "config.yaml"), LIMIT_S)
                connections = _count_connections(server)
            left = [*end.leftovers, *(f"/dev/shm/{name}" for name in sorted(_unused_shared_memory() - unused))]
            left += [f"output/{path.name}" for path in config.output.glob(".*")]
            rollouts = config.output / "rollouts"
            steps = saved_steps(rollouts, "training") if rollouts.exists() else []
            return Outcome(
                exit_code=end.exit_code,
                seconds=end.seconds,
                descriptors=_count_targets(end.descriptors, folder),
                leftovers=left,
                connections=connections,
                metrics=read_metrics(config.output),
                rows=[row for step in steps for row in read_rows(rollouts, "training", step)],
                error=end.error,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _config(self, kind: Kind, folder: Path, port: int) -> GRPOConfig:
        rows = [json.loads(line) for line in (self._folder / "task/train.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(row | {"kind": kind.name, "port": port}) + "\n" for row in rows)
        (folder / "train.jsonl").write_text(text)
        settings = quickstart_settings(
            self._folder / "task", folder / "run", steps=STEPS, batch_size=BATCH_SIZE, samples_per_prompt=SAMPLES
        )
        settings |= {
            "recipe": "recipes.grpo.config:GRPOConfig",
            "data": {"train": folder / "train.jsonl", "test": None, "max_prompt_tokens": 16},
            "reference": None,
            "algorithm": {"estimator": "grpo"},
            "minibatch_size": BATCH_SIZE // 2,
            "rollout": {"max_response_tokens": 6 if kind.source == "reward" else 256},
            "evaluate_every": 0,
            "report": NO_REPORT | {"rollouts": {"every": 1, "rows": BATCH_SIZE, "max_mb": None}},
            "checkpoint": {"every": 100},
        }
        if kind.source != "reward":
            # so slowly that the policy still calls tools
            settings["actor"] = {"model": {"path": self._folder / "calling"}, "optimizer": {"lr": 1e-5}}
        return GRPOConfig.model_validate(settings | _scoring_settings(kind))


def _scoring_settings(kind: Kind) -> dict[str, Any]:
    limits = {
        "on_failure": kind.on_failure,
        "memory_mb": MEMORY_MB,
        "max_failure_rate": 0.1 if kind.name.endswith("@always") else MAX_FAILURE_RATE,
    }
    if kind.source == "reward":
        function = {"sync": "score", "async": "score_async", "batched": "score_batch"}[kind.form]
        batch = {"rows_per_call": 4} if kind.form == "batched" else {}
        return {"reward": {"function": f"{CODE}:{function}", "timeout_s": REWARD_TIMEOUT_S, **batch, **limits}}
    name, options = f"{CODE}:TwoTurns", {}
    if kind.source == "tool":
        name = "flowrl.environments.tool_environment:ToolEnvironment"
        options = {
            "tools": [f"{CODE}:{tool}" for tool in TOOLS],
            "reward": "recipes.quickstart.task:score",
            "max_turns": 3,
            "tool_timeout_s": TOOL_TIMEOUT_S,
            "max_result_chars": 100,
            "columns": ["prompt", "kind", "port"],
        }
    elif kind.name == "hang":
        name += "InThreads"
    return {
        "reward": None,
        "environment": {"name": name, "options": options, "timeout_s": STEP_TIMEOUT_S, **limits},
    }


def _misbehaves(kind: Kind, row: Mapping[str, Any]) -> bool:
    """Returns whether a call for a saved row has misbehaved."""
    if kind.source == "reward":
        return kind.name.endswith("@always") or is_chosen(row["prompt"], row["response"])
    call = call_of(TOOLS[kind.form == "async"])
    return is_chosen(row["prompt"]) and (kind.source == "environment" or call in row["response"])


def _find_problems(kind: Kind, result: Result, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields what the run should have done differently."""
    if result.exit_code != kind.exit_code:
        yield f"exit code {result.exit_code} instead of {kind.exit_code}"
    if not kind.exit_code and result.steps != STEPS:
        yield f"{result.steps} steps"
    if kind.on_failure == "zero" and not kind.exit_code:
        if not result.calls:
            yield "no call has misbehaved"
        wrong = [
            row["prompt"] for row in rows if bool(row["reward_failures"]) != (kind.costs_row and _misbehaves(kind, row))
        ]
        if wrong or result.lost != (result.calls if kind.costs_row else 0):
            yield f"{result.lost} of {result.calls} rows have failed, wrongly {wrong[:8]}"
    if kind.counted is not None and result.counted.get(kind.counted, 0) < result.calls:
        yield f"{kind.counted} is {result.counted.get(kind.counted)}"
    if kind.has_same_numbers and not result.has_same_numbers:
        yield "the metrics differ from those of the undisturbed run"
    if result.connections:
        yield f"{result.connections} connections"
    yield from (f"left behind: {name}" for name in result.leftovers)


def _policy_metrics(records: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if not name.startswith(DEPENDS_ON_FAULTS)} for line in records]


def _sum_events(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for line in records:
        counts.update({name: round(value) for name, value in line.items() if name.startswith("environment/")})
    return {name: count for name, count in sorted(counts.items()) if count}


def _count_targets(descriptors: Iterable[str], folder: Path) -> Counter[str]:
    """Counts descriptors by their targets, without the folder of the run and the numbers of pipes and sockets."""
    targets = (target.replace(f"{folder}/", "") for target in descriptors)
    return Counter(re.sub(r":\[\d+\]$", "", target) for target in targets)


def _count_connections(server: socket.socket) -> int:
    server.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count


def _unused_shared_memory() -> set[str]:
    """Returns the files in shared memory that no process uses."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used |= {
                line.partition("/dev/shm/")[2].strip() for line in maps.read_text().splitlines() if "/dev/shm/" in line
            }
    return {path.name for path in Path("/dev/shm").iterdir()} - used
