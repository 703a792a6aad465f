"""Scores rows with the reward functions of a run. All calls run concurrently, in separate processes."""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from flowrl.config import RewardComponent, RewardConfig, ServiceConfig
from flowrl.rewards.pool import PoolLimits, ScoringPool
from flowrl.rewards.reward_function import SHORT_REPR, FunctionSpec, Outcome, RewardError

if TYPE_CHECKING:
    from flowrl.rewards.service import RewardService


FAILED, CALLS = "reward_failed", "reward_calls"
"""Names of the row columns of a reward: whether a call failed, and the records of all calls as plain dictionaries."""


@dataclass(frozen=True)
class RewardCall:
    """Record of the call of one reward for one response."""

    score: float | None
    """Score, before its weight; None if the call failed."""
    seconds: float | None = None
    """Duration of the call in seconds, without waiting in a queue and without failed attempts before it. None for a
    model.
    """
    failure: str | None = None
    """Kind of failure, such as `timeout`, or None."""
    message: str = ""
    """Cause of the failure."""

    def to_dict(self) -> dict[str, str | float | None]:
        """Returns the fields by name, as in the column `CALLS`."""
        return dict(vars(self))  # dataclasses.asdict takes 20 times as long


@dataclass(frozen=True)
class RowScores:
    """Result of all rewards for one response."""

    values: Mapping[str, float]
    """Column -> score. NaN if the reward does not apply to the data source of the row."""
    calls: Mapping[str, RewardCall]
    """Name of a reward -> record of its call. Rewards that do not apply have none."""

    @property
    def is_failed(self) -> bool:
        """Whether a call has failed."""
        return any(call.failure is not None for call in self.calls.values())


def pool_limits(config: RewardConfig, workers: int) -> PoolLimits:
    """Returns the limits of the functions of a reward, in `workers` processes."""
    return PoolLimits(
        workers=workers,
        timeout_s=config.timeout_s,
        retries=config.retries,
        memory_mb=config.memory_mb,
        allow_network=config.network,
        max_concurrent=config.max_concurrent,
    )


class RowScorer:
    """Scores rows with the components of a reward that are functions or services."""

    def __init__(self, config: RewardConfig, *, workers: int) -> None:
        """Starts `workers` processes, which import the functions. Does not wait."""
        self._config = config
        components = [part for part in config.training_components if not part.is_model]
        self._components = {
            False: components,
            True: components if config.evaluation is None else list(config.evaluation_components),
        }
        """Components of training (key False) and of evaluations (key True)."""
        self._columns = {kind: config.function_columns(evaluation=kind) for kind in self._components}
        functions = {_unique_name(part, kind): part for kind, parts in self._components.items() for part in parts}
        self._has_functions = any(part.function is not None for part in functions.values())
        self._pool = ScoringPool(
            [
                FunctionSpec(name, part.function, part.options, part.rows_per_call)
                for name, part in functions.items()
                if part.function is not None
            ],
            pool_limits(config, workers),
        )
        if self._has_functions:
            self._pool.start()
        self._services = {
            name: _connect_service(part.service) for name, part in functions.items() if part.service is not None
        }

    def submit(self, row: Mapping[str, Any], owner: Hashable = None, *, evaluation: bool = False) -> Future[RowScores]:
        """Scores a row. Does not wait, and does not use `owner`.

        The future has the scores of all functions that apply to the row's `data_source`. With `on_failure: stop`, it
        raises RewardError if a call fails.
        """
        components = self._components[evaluation]
        applied = [part for part in components if part.applies_to(row.get("data_source"))]
        result = _PendingRow(self._config, components, self._columns[evaluation], row, len(applied))
        for part in applied:
            name = _unique_name(part, evaluation)
            source = self._services.get(name)
            outcome = self._pool.submit(name, row) if source is None else source.submit(row)
            outcome.add_done_callback(lambda future, name=part.name: result.add(name, future))
        return result.future

    def find_missing_protections(self) -> tuple[str, ...]:
        """Returns the protections that the system does not offer to the functions. Starts a process for it, and blocks.

        Services run elsewhere, so they have none.
        """
        return self._pool.find_missing_protections() if self._has_functions else ()

    def discard(self, owner: Hashable) -> None:
        """Does nothing, because the results of rows that nobody waits for are ignored."""

    def close(self) -> None:
        """Ends all processes and requests."""
        self._pool.close()
        for service in self._services.values():
            service.close()


def _connect_service(config: ServiceConfig) -> "RewardService":
    """Starts the client of a reward service."""
    from flowrl.rewards.service import RewardService  # noqa: PLC0415 (httpx and tenacity only for a service)

    return RewardService(config)


def _unique_name(part: RewardComponent, is_evaluation: bool) -> str:
    return f"{'evaluation' if is_evaluation else 'training'}/{part.name}"


class _PendingRow:
    """Collects the outcomes of all calls for a row."""

    def __init__(
        self,
        config: RewardConfig,
        components: Sequence[RewardComponent],
        columns: Collection[str],
        row: Mapping[str, Any],
        num_calls: int,
    ) -> None:
        self.future: Future[RowScores] = Future()
        self._config, self._components, self._columns = config, components, columns
        self._row, self._num_calls = row, num_calls
        self._outcomes: dict[str, Outcome] = {}
        self._lock = Lock()
        if not num_calls:
            self.future.set_result(self._scores())

    def add(self, name: str, future: Future[Outcome]) -> None:
        """Adds the outcome of a call. After the last call, sets the result."""
        with self._lock:
            self._outcomes[name] = future.result()
            if len(self._outcomes) < self._num_calls:
                return
        # In the order of the rewards, because that of the calls differs between equal runs.
        names = [part.name for part in self._components if part.name in self._outcomes]
        self._outcomes = {name: self._outcomes[name] for name in names}
        failures = [(name, outcome) for name, outcome in self._outcomes.items() if outcome.failure is not None]
        if failures and self._config.on_failure == "stop":
            self.future.set_exception(RewardError(self._describe(*failures[0])))
        else:
            self.future.set_result(self._scores())

    def _describe(self, name: str, outcome: Outcome) -> str:
        """Returns the cause of a failure, the row, and the setting that limits the time of a function."""
        (part,) = (part for part in self._components if part.name == name)
        names = [column for column in ("prompt", "response", "answer") if column in self._row]
        columns = [f"{name} {SHORT_REPR.repr(self._row[name])}" for name in names]
        # A message of the function's process already shows the inputs of the function.
        shown = ", ".join(column for column in columns if column not in outcome.message)
        row = f" for {shown}" if shown else ""
        is_late = outcome.failure == "timeout" and part.function is not None
        fix = ": make it faster, or increase reward.timeout_s" if is_late else ""
        return f"{outcome.message}{row}{fix}"

    def _scores(self) -> RowScores:
        scores = {part.name: float("nan") for part in self._components}
        for name, outcome in self._outcomes.items():
            scores[name] = 0.0 if outcome.score is None else outcome.score
        calls = {
            name: RewardCall(outcome.score, outcome.seconds, outcome.failure, outcome.message)
            for name, outcome in self._outcomes.items()
        }
        values = {name: score for name, score in scores.items() if name in self._columns}
        if "scores" in self._columns:
            # The rewards that apply are those whose score is not NaN.
            weights = {part.name: part.weight for part in self._components}
            terms = [weights[name] * score for name, score in scores.items() if not math.isnan(score)]
            values["scores"] = math.fsum(terms)
        return RowScores(values, calls)
