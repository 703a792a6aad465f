"""Defines Rewards, which scores responses with all rewards of a run: functions, services and models."""

import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from tensordict import TensorDict

from flowrl.config import EnvironmentConfig, RewardComponent, RewardConfig, UserError
from flowrl.controller.calls.calls import Calls
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import make_tensordict, num_rows, objects
from flowrl.data.metric import Mean, Metric, Sum
from flowrl.rewards.pool import PoolLimits
from flowrl.rewards.reward_function import SHORT_REPR, RewardError
from flowrl.rewards.row_scorer import CALLS, FAILED, RewardCall, pool_limits
from flowrl.user_code.channel import ServerAddress
from flowrl.workers.dialogs import EPISODE, TURN_REWARDS, EnvironmentServers

TRUNCATED = "reward_truncated"


class HeldOutResponses:
    """Held-out prompts, whose responses a replica generates alongside training. Their scoring follows."""

    def __init__(
        self, prompts: Batch, temperature: float, score: Sequence[str], finish: Callable[[Batch], Batch], calls: Calls
    ) -> None:
        """Stores the prompts.

        Args:
            prompts: one row per response.
            temperature: sampling temperature; 0 is greedy.
            score: columns of the reward that the rollout receives while it generates.
            finish: submits the scoring of the prompts with their responses, and returns the batch with the scores.
            calls: calls of the driver, which generate the responses.
        """
        self.prompts, self.temperature, self.score = prompts, temperature, tuple(score)
        self._finish, self._calls = finish, calls
        self._scored: Batch | None = None

    def set_responses(self, responses: Batch) -> None:
        """Sets the responses, and submits their scoring."""
        self._scored = self._finish(self.prompts.union(responses))

    def done(self) -> bool:
        """Returns whether all responses have their scores."""
        return self._scored is not None and self._scored.select("scores").done()

    def get(self) -> Batch:
        """Waits for the responses, and returns the batch with the scores, which may still be computed."""
        self._calls.wait_until(lambda: self._scored is not None)
        assert self._scored is not None
        return self._scored


class GenerateAlongside(Protocol):
    """Starts the generation of held-out responses alongside training."""

    def __call__(
        self, prompts: Batch, temperature: float, score: Sequence[str], finish: Callable[[Batch], Batch]
    ) -> HeldOutResponses | None:
        """Returns the pending responses, or None if the recipe must call `rollout.generate`. Does not wait for them.

        The arguments are those of `HeldOutResponses`.
        """
        ...


class Scoring(Protocol):
    """Scores the responses of a run. `Run.rewards` returns an object with this interface."""

    alongside: GenerateAlongside | None
    """Set by a schedule that can generate held-out responses alongside training."""

    @property
    def limits(self) -> PoolLimits:
        """Limits of the user's functions, which also apply to `evaluation.extract_answer`."""
        ...

    @property
    def generate_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, `add` and `poll` with which a rollout has its responses scored."""
        ...

    def connect(self, rollout: WorkerGroup) -> None:
        """Connects the rollout workers to those that score. Blocks until these listen."""
        ...

    @property
    def has_models(self) -> bool:
        """Whether `add_model_scores` computes scores."""
        ...

    def add_model_scores(self, batch: Batch) -> Batch:
        """Returns a generated batch with its final columns. Does not block."""
        ...

    def score(self, batch: Batch, evaluation: bool = False) -> Batch:
        """Returns the columns of all rewards for responses that were not scored during generation. Does not block.

        In the loop over steps, until `Run.due`, the metrics of the rewards are added to the step, and failures count
        for `max_failure_rate`. `evaluation` selects the rewards of evaluations, which are not measured here. Raises
        UserError if an environment gives the rewards.
        """
        ...

    def generate_scored(self, rollout: Any, batch: Batch, temperature: float) -> Batch | HeldOutResponses:
        """Returns held-out prompts with responses and the scores of evaluations, if possible alongside training. Does
        not wait for the responses.
        """
        ...


class EnvironmentScoring:
    """The environment workers of a run, whose environments give the rewards."""

    has_models = False
    alongside: GenerateAlongside | None = None

    def __init__(self, config: EnvironmentConfig, group: WorkerGroup, max_prompt_tokens: int) -> None:
        self._config, self._group, self._max_prompt_tokens = config, group, max_prompt_tokens
        self._connected: WorkerGroup | None = None

    @property
    def limits(self) -> PoolLimits:
        config = self._config
        return PoolLimits(config.workers, config.timeout_s, memory_mb=config.memory_mb, allow_network=config.network)

    @property
    def generate_arguments(self) -> dict[str, Any]:
        return {"score": ("scores", TURN_REWARDS, EPISODE)}

    def connect(self, rollout: WorkerGroup) -> None:
        if self._connected is rollout:
            return
        self._connected = rollout
        addresses, key = serve(self._group)
        config = self._config
        servers = EnvironmentServers(
            addresses, key, self._max_prompt_tokens, config.restarts, config.on_failure == "stop"
        )
        rollout.connect_environment(servers)

    def add_model_scores(self, batch: Batch) -> Batch:
        return batch

    def score(self, batch: Batch, evaluation: bool = False) -> Batch:
        raise UserError(
            "reward.score was called in a run with an environment, which gives the rewards during generation: pass "
            "reward=run.rewards() to run.rollouts in the recipe, or replace environment by reward"
        )

    def generate_scored(
        self, rollout: Any, batch: Batch, temperature: float
    ) -> Batch | HeldOutResponses:  # Any: a group of rollouts
        score = self.generate_arguments["score"]
        pending = None
        if self.alongside is not None:
            pending = self.alongside(batch, temperature, score, lambda generated: generated)
        if pending is not None:
            return pending
        self.connect(rollout)
        return batch.union(rollout.generate.submit(batch, temperature=temperature, score=score))


def serve(group: WorkerGroup) -> tuple[list[ServerAddress], bytes]:
    """Starts the servers of a group, whose processes are replaced if they are lost. Returns the addresses and the key
    of the servers. Blocks.
    """
    key = secrets.token_bytes(32)
    servers = group.serve(key)
    # A replacement process repeats the last call. This call names the ports, so that the addresses stay the same.
    group.serve(key, [server.port for server in servers])
    group.keep_alive()
    return servers, key


class Rewards:
    """The worker groups of a reward. `Run.rewards` creates it.

    Functions score a response as soon as it is generated, because rollout workers send it to the reward workers.
    Models score complete batches or groups.
    """

    alongside: GenerateAlongside | None = None

    def __init__(
        self,
        config: RewardConfig,
        groups: Mapping[str, WorkerGroup],
        role: str,
        on_scored: Callable[[Batch], None] = lambda scored: None,
    ) -> None:
        """Stores the settings and the worker groups of a reward.

        Args:
            config: settings of the reward.
            groups: worker group of each role of the reward (`config.roles(role)`), by name.
            role: name of the reward's field in the config of the run, usually `reward`.
            on_scored: called with each batch that the recipe has scored with the rewards of training.
        """
        self._config, self._on_scored = config, on_scored
        self._functions = groups.get(role)
        """Group that calls the functions of training or of evaluations, if there are any."""
        name_role = (lambda part: role) if config.components is None else (lambda part: f"{role}_{part.name}")
        self._models = [(part, groups[name_role(part)]) for part in config.training_components if part.is_model]
        """Models and judges, which compute one reward each."""
        self.sent_columns = config.function_columns()
        """Columns that rollout workers receive from the functions while they generate. Empty without functions."""

    @property
    def limits(self) -> PoolLimits:
        return pool_limits(self._config, self._config.workers)

    @property
    def generate_arguments(self) -> dict[str, Any]:
        """Arguments of the calls of a rollout whose responses functions score."""
        return {"score": self.sent_columns} if self.sent_columns else {}

    def connect(self, rollout: WorkerGroup) -> None:
        """Connects the rollout workers to the reward workers. Blocks until the reward workers listen."""
        if self.sent_columns and self._functions is not None:
            rollout.connect_reward(*serve(self._functions))

    @property
    def has_models(self) -> bool:
        """Whether models compute some of the scores."""
        return self._config.has_models

    def generate_scored(
        self, rollout: Any, batch: Batch, temperature: float
    ) -> Batch | HeldOutResponses:  # Any: a group of rollouts
        """Returns held-out prompts with responses and the scores of evaluations. Does not wait for the responses.

        Functions score them after generation, because evaluations can have other rewards.
        """

        def finish(generated: Batch) -> Batch:
            return generated.union(self.score(generated, evaluation=True))

        pending = None if self.alongside is None else self.alongside(batch, temperature, (), finish)
        if pending is not None:
            return pending
        return finish(batch.union(rollout.generate.submit(batch, temperature=temperature)))

    def score(self, batch: Batch, evaluation: bool = False) -> Batch:
        has_own_rewards = evaluation and self._config.evaluation is not None
        if self._functions is not None and (has_own_rewards or not self._models):
            scored = self._functions.score(batch, evaluation=evaluation)
        else:
            if self._functions is not None and self.sent_columns:
                batch = batch.union(self._functions.score(batch))
            scored = self.add_model_scores(batch)
        if not evaluation:
            self._on_scored(scored)
        return scored

    def add_model_scores(self, batch: Batch) -> Batch:
        """Returns a batch with the scores of models and the sum of all scores, given those of functions.

        Does not block. Without models, returns the batch.
        """
        if not self._models:
            return batch
        for part, group in self._models:
            scored = group.score(batch)
            batch = batch.union(scored.rename({name: f"{part.name}/{name}" for name in scored.columns}))
        names = [name for name in batch.columns if "/" in name]
        config = self._config
        functions = [part.name for part in config.training_components if not part.is_model]
        others = [name for name in (FAILED, CALLS, "data_source") if name in batch]
        writes = [*config.columns, TRUNCATED, FAILED, CALLS]
        combined = batch.apply(combine_scores, [*functions, *names, *others], writes, config=config)
        return batch.drop(*names, *(name for name in writes if name in batch)).union(combined)


def combine_scores(table: TensorDict, config: RewardConfig) -> TensorDict:
    """Returns the columns of a reward that has models: `RewardConfig.columns`, `reward_truncated`, `reward_failed` and
    `reward_calls`. Runs on the task worker.

    The column of a reward is NaN for rows of other data sources. A reward fails if a judge returns no verdict, or a
    reward model no finite number. Raises RewardError if a reward failed and `on_failure` is stop.

    Args:
        table: the columns of the functions, and for each model the columns `NAME/scores` and `NAME/reward_truncated`,
            or `NAME/scores`, `NAME/failed` and `NAME/judgment` of a judge.
        config: settings of the reward.
    """
    rows = {name: table["rows"].get(name) for name in table["rows"].keys()}  # noqa: SIM118 (a TensorDict)
    sources = objects(table, "data_source") if "data_source" in rows else [None] * num_rows(table)
    calls = [dict(row) for row in objects(table, CALLS)] if CALLS in rows else [{} for _ in sources]
    false_B = torch.zeros(num_rows(table), dtype=torch.bool)
    is_truncated_B, failed_B = false_B.clone(), rows.get(FAILED, false_B).clone()
    columns: dict[str, Any] = {}
    for part in config.training_components:
        if not part.is_model:
            columns[part.name] = rows[part.name]
            continue
        applies_B = torch.tensor([part.applies_to(source) for source in sources], dtype=torch.bool)
        scores_B = rows[f"{part.name}/scores"]
        is_truncated_B |= rows.get(f"{part.name}/{TRUNCATED}", false_B) & applies_B
        own_failed_B = (rows.get(f"{part.name}/failed", false_B) | ~scores_B.isfinite()) & applies_B
        failed_B |= own_failed_B
        columns[part.name] = scores_B.masked_fill(own_failed_B, 0.0).masked_fill(~applies_B, torch.nan)
        texts = objects(table, f"{part.name}/judgment") if f"{part.name}/judgment" in rows else None
        for i in applies_B.nonzero().flatten().tolist():
            score, text = float(scores_B[i]), "" if texts is None else texts[i]
            call = RewardCall(score, message=text)
            if own_failed_B[i]:
                call = RewardCall(None, failure="judgment", message=text)
                if part.model is not None:
                    call = RewardCall(
                        None, failure="invalid", message=f"reward model {part.model.path} returned {score}"
                    )
                if config.on_failure == "stop":
                    raise RewardError(_describe_failure(part, call))
            calls[i][part.name] = call.to_dict()
    scores_BK = torch.stack([columns[part.name] for part in config.training_components], dim=-1)
    weights_K = torch.tensor([part.weight for part in config.training_components])
    columns["scores"] = (scores_BK.nan_to_num(0.0) * weights_K).sum(-1)
    columns = {name: columns[name] for name in config.columns}
    return make_tensordict(columns | {TRUNCATED: is_truncated_B, FAILED: failed_B, CALLS: calls})


def _describe_failure(part: RewardComponent, call: RewardCall) -> str:
    """Returns the error message for a failed reward of a judge or of a reward model."""
    if part.model is None:
        text = SHORT_REPR.repr(call.message)
        return f"judge {part.name} returned no verdict: {text}; correct its prompt, or set reward.on_failure"
    return f"{call.message}, which is not a finite number: use another model or dtype, or set reward.on_failure"


_MAX_CAUSE = 300
"""Largest number of characters of the cause of a failed reward in a message."""


def shorten_cause(message: str) -> str:
    """Returns the start of the cause of a failed reward, on one line."""
    return " ".join(message.split())[:_MAX_CAUSE] or "unknown"


@dataclass(frozen=True)
class FailedFraction(Mean):
    """Share of the responses whose reward failed."""

    cause: str = ""
    """Cause of the first failure; empty without failures."""

    def merge(self, other: Self) -> "FailedFraction":
        return FailedFraction(self.total + other.total, self.count + other.count, self.cause or other.cause)


def reward_metrics(batches: Sequence[Batch]) -> list[Future | LocalRef]:
    """Returns futures of the metrics of scored batches, before rows and groups are dropped. Does not block."""
    names = (FAILED, CALLS, EPISODE)
    return [
        batch.reduce(measure_rewards, [name for name in names if name in batch]) for batch in batches if CALLS in batch
    ]


def measure_rewards(table: TensorDict) -> dict[str, Metric]:
    """Returns `reward_failed_fraction`, and mean score, failed fraction and seconds of each reward.

    Runs on the task worker.
    """
    rows = objects(table, CALLS)
    messages = (call["message"] for row in rows for call in row.values() if call["failure"] is not None)
    cause = next(map(shorten_cause, messages), "")
    metrics: dict[str, Metric] = {
        "reward_failed_fraction": FailedFraction(float(table["rows", FAILED].sum()), num_rows(table), cause),
    }
    if EPISODE in table["rows"].keys():  # noqa: SIM118 (a TensorDict)
        metrics |= _measure_episodes(objects(table, EPISODE))
    calls: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        for name, call in row.items():
            calls[name].append(call)
    for name, records in calls.items():
        scores = [call["score"] for call in records if call["failure"] is None]
        seconds = [call["seconds"] for call in records if call["seconds"] is not None]
        metrics[f"rewards/{name}"] = Mean(math.fsum(scores), len(scores))
        metrics[f"rewards/{name}/failed_fraction"] = Mean(len(records) - len(scores), len(records))
        if seconds:
            metrics[f"rewards/{name}/seconds"] = Mean(math.fsum(seconds), len(seconds))
    return metrics


def _measure_episodes(records: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    """Returns mean turns, restarts, and the counted events of episodes."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record["counts"])
    metrics: dict[str, Metric] = {
        "turns": Mean(sum(record["turns"] for record in records), len(records)),
        "environment/restarts": Sum(sum(record["restarts"] for record in records)),
    }
    return metrics | {f"environment/{name}": Sum(count) for name, count in counts.items()}
