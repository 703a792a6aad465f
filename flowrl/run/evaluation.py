"""Evaluation during a run: responses to held-out prompts and their scores, or the loss on held-out examples."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from torch import Tensor

from flowrl.algorithms.evaluation_estimates import (
    Interval,
    best_at_k,
    bootstrap_interval,
    majority_at_k,
    mean_at_k,
    mean_over_prompts,
    pass_at_k,
)
from flowrl.config import EvaluationConfig
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.tensordicts import objects
from flowrl.data.metric import FAILED_AS_BEST, FAILED_AS_WORST, FAILED_FRACTION, NUM_FAILED
from flowrl.report.rollout_log import Row
from flowrl.report.run_observer import RunObserver
from flowrl.rewards.pool import PoolLimits, extract_answers
from flowrl.rewards.row_scorer import FAILED
from flowrl.run.rollout_rows import collect_rows
from flowrl.schedules.rewards import HeldOutResponses
from flowrl.workers.dialogs import EPISODE

if TYPE_CHECKING:
    from flowrl.schedules.rewards import Scoring
    from flowrl.workers.groups import ActorGroup, RewardGroup, RolloutGroup


SOURCE = "accuracy_source/"
"""Prefix of the metrics of a data source."""


@dataclass(frozen=True)
class PromptScores:
    """The scores of a set of prompts. Shape suffixes: P prompts, N responses per prompt.

    A response whose reward failed has no score. Each estimate uses the prompts with enough scores.
    """

    scores_PN: Tensor
    """NaN: the response has no score."""
    prompt_ids: Sequence[int]
    sources: Sequence[str | None]
    """Data source of each prompt, or None."""
    answers: Sequence[Sequence[str | None]] | None = None
    """Final answer of each response, or None if it has none. None if the run has no function that extracts answers."""

    @property
    def is_scored(self) -> bool:
        """Whether any response has a score."""
        return not bool(self.scores_PN.isnan().all())

    @property
    def strata(self) -> Sequence[str | None] | None:
        """Data source of each prompt. None if all prompts have the same source."""
        return self.sources if len(set(self.sources)) > 1 else None

    def of_source(self, source: str | None) -> "PromptScores":
        """Returns the prompts of one data source."""
        own = [i for i, other in enumerate(self.sources) if other == source]
        answers = None if self.answers is None else [self.answers[i] for i in own]
        return PromptScores(self.scores_PN[own], [self.prompt_ids[i] for i in own], [source] * len(own), answers)

    def means(self) -> Tensor:
        """Returns the mean score of each prompt, [P]. NaN for a prompt without a score."""
        return mean_at_k(self.scores_PN)

    def interval(self, values_P: Tensor) -> Interval:
        """Returns the mean of an estimate over the prompts that have it, and its bootstrap interval over these prompts.

        The interval keeps the sizes of data sources. Returns NaN if no prompt has the estimate.
        """
        known_P = ~values_P.isnan()
        if not known_P.any():
            return Interval(math.nan, math.nan, math.nan)
        strata = None if self.strata is None else list(compress(self.strata, known_P.tolist()))
        return bootstrap_interval(values_P[known_P], strata=strata)

    def estimate(self, pass_score: float) -> dict[str, Tensor]:
        """Returns the estimates that need several samples, by the end of their name: one value per prompt, [P].

        NaN for a prompt with too few scores.
        """
        k = self.scores_PN.shape[1]
        if k == 1:
            return {}
        estimates = {
            f"best@{k}": best_at_k(self.scores_PN, k),
            f"pass@{k}": pass_at_k(self.scores_PN, k, min_score=pass_score),
        }
        if self.answers is not None:
            estimates[f"majority@{k}"] = majority_at_k(self.scores_PN, self.answers)
        return estimates

    def measure_failures(self, pass_score: float) -> dict[str, float]:
        """Returns number and share of the responses without a score, and the bounds of the mean score over all
        responses. Returns nothing if all have a score.

        The worst score is 0, or the lowest score if it is negative. The best one is the highest score, and at least
        `pass_score`.
        """
        missing_PN = self.scores_PN.isnan()
        num_missing = int(missing_PN.sum())
        if not num_missing:
            return {}
        known = self.scores_PN[~missing_PN].tolist()
        bounds = {FAILED_AS_WORST: min([0.0, *known]), FAILED_AS_BEST: max([pass_score, *known])}
        return {
            NUM_FAILED: float(num_missing),
            FAILED_FRACTION: num_missing / missing_PN.numel(),
            **{
                name: mean_over_prompts(mean_at_k(self.scores_PN.masked_fill(missing_PN, score)))
                for name, score in bounds.items()
            },
        }


class Evaluation(Mapping[str, float]):
    """Result of an evaluation, for `run.log`: its metrics, and the rows to save in `rollouts/`."""

    def __init__(
        self,
        metrics: Mapping[str, float],
        num_rows: int = 0,
        rows: Sequence[Row] = (),
        scores: Mapping[str, PromptScores] | None = None,
    ) -> None:
        self._metrics = dict(metrics)
        self.num_rows = num_rows
        """Number of prompts or examples."""
        self.rows = rows
        """Rows to save in `rollouts/`."""
        self.scores = dict(scores or {})
        """Scores of each set of prompts, by the name of the set. The name of prompts without a name is empty."""

    def __getitem__(self, name: str) -> float:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._metrics})"


class PendingEvaluation(Evaluation):
    """An evaluation whose responses are generated alongside training. Reading its metrics waits for the responses."""

    def __init__(self, responses: Sequence[HeldOutResponses], num_rows: int, measure: Callable[[], Evaluation]) -> None:
        """Stores the responses of all sets. `measure` waits for them and returns the result."""
        super().__init__({}, num_rows)
        self._responses, self._measure = responses, measure
        self._is_measured = False

    def done(self) -> bool:
        """Returns whether all responses have their scores."""
        return self._is_measured or all(responses.done() for responses in self._responses)

    def wait(self) -> None:
        """Waits for the responses, and sets metrics and rows."""
        if not self._is_measured:
            result = self._measure()
            self._metrics, self.rows = dict(result), result.rows
            self._is_measured, self._responses = True, ()

    def __getitem__(self, name: str) -> float:
        self.wait()
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        self.wait()
        return super().__iter__()

    def __len__(self) -> int:
        self.wait()
        return super().__len__()


_GREEDY = EvaluationConfig()

_DEFAULT_LIMITS = PoolLimits(workers=2, timeout_s=60.0)
"""Limits of the function that extracts answers if the settings of the reward are unknown."""


def evaluate(
    rollout: "RolloutGroup",
    reward: "RewardGroup | Scoring",
    prompts: Batch | Mapping[str, Batch],
    config: EvaluationConfig | Mapping[str, EvaluationConfig] = _GREEDY,
) -> Evaluation:
    """Generates responses to held-out prompts and scores them with the evaluation reward.

    Blocks, unless `schedule.concurrent_evaluation` of `schedule: async` chooses an evaluation alongside training, with
    `run.rewards()` and before the last step. Then it returns a `PendingEvaluation` at once, and one replica generates
    the responses.

    Args:
        rollout: generates with the newest weights that were sent.
        reward: scores the responses. `run.rewards()` also has the limits of `config.extract_answer`. With a worker
            group, its calls have 60 s, 2 processes and no network.
        prompts: prompts with the columns of `PromptStream`, or several named sets of prompts.
        config: number of samples, and temperature. A mapping has those of each set (`config.evaluation_by_set`).

    Returns: `accuracy`, the mean score, its bootstrap interval `evaluation/accuracy_low` and
        `evaluation/accuracy_high`, and `evaluation/response_length`, the mean number of tokens. With k > 1 samples also
        `accuracy_best@k`, `accuracy_pass@k` and `accuracy_majority@k`. With several data sources also
        `accuracy_source/SOURCE`. With an environment also `evaluation/turns` and `evaluation/environment/EVENT`. If
        rewards failed, also `evaluation/failed`, `evaluation/failed_fraction`, `evaluation/failed_as_worst` and
        `evaluation/failed_as_best`; these responses have no score. For named sets, the names end with `/NAME`.
    """

    def generate(rows: Batch, own: EvaluationConfig) -> Batch | HeldOutResponses:
        if not isinstance(reward, WorkerGroup):
            return reward.generate_scored(rollout, rows.with_samples(own.samples), own.temperature)
        batch = generate_responses(rollout, rows, own)
        return batch.union(reward.score(batch, evaluation=True))

    scores: dict[str, PromptScores] = {}
    limits = _DEFAULT_LIMITS if isinstance(reward, WorkerGroup) else reward.limits

    def measure(name: str, batch: Batch, own: EvaluationConfig) -> dict[str, float]:
        scores[name] = collect_scores(batch, own, limits)
        metrics = measure_scores(scores[name], own)
        return metrics | (batch.reduce(measure_episodes, (EPISODE,)).get() if EPISODE in batch else {})

    result = evaluate_sets(prompts, config, generate, measure)
    result.scores = scores  # `measure` adds the scores of a pending evaluation later
    return result


def generate_responses(rollout: "RolloutGroup", prompts: Batch, config: EvaluationConfig) -> Batch:
    """Returns held-out prompts with their responses. Does not block."""
    batch = prompts.with_samples(config.samples)
    return batch.union(rollout.generate.submit(batch, temperature=config.temperature))


def evaluate_sets(
    prompts: Batch | Mapping[str, Batch],
    config: EvaluationConfig | Mapping[str, EvaluationConfig],
    generate: Callable[[Batch, EvaluationConfig], Batch | HeldOutResponses],
    measure: Callable[[str, Batch, EvaluationConfig], Mapping[str, float]],
) -> Evaluation:
    """Generates responses to held-out prompts. Returns their metrics, and their rows for the log of rollouts.

    Blocks, unless `generate` returns `HeldOutResponses`.

    Args:
        prompts: prompts, or several named sets of prompts. For named sets, the names of metrics end with `/NAME`.
        config: settings of all sets, or of each set by its name.
        generate: returns prompts with their responses, given the prompts and the settings of a set. It is called for
            all sets before `measure`, so that the calls of the sets overlap.
        measure: returns metrics of a set, given its name, its prompts with responses, and its settings. The name is
            empty if there is only one set.
    """
    sets = {"": prompts} if isinstance(prompts, Batch) else prompts
    own = dict.fromkeys(sets, config) if isinstance(config, EvaluationConfig) else config
    generated = {name: generate(rows, own[name]) for name, rows in sets.items() if len(rows)}
    num_rows = sum(len(rows) for rows in sets.values())
    pending = [responses for responses in generated.values() if isinstance(responses, HeldOutResponses)]

    def measure_all() -> Evaluation:
        batches = {
            name: responses.get() if isinstance(responses, HeldOutResponses) else responses
            for name, responses in generated.items()
        }
        return measure_sets(batches, own, measure, num_rows)

    return PendingEvaluation(pending, num_rows, measure_all) if pending else measure_all()


def measure_sets(
    batches: Mapping[str, Batch],
    own: Mapping[str, EvaluationConfig],
    measure: Callable[[str, Batch, EvaluationConfig], Mapping[str, float]],
    num_rows: int,
) -> Evaluation:
    """Measures responses to held-out prompts. The arguments are those of `evaluate_sets`, by the name of the set."""
    metrics: dict[str, float] = {}
    saved: list[Row] = []
    for name, batch in batches.items():
        batch = _without_failed_scores(batch)
        ending = f"/{name}" if name else ""
        length = float(batch.get("response_mask").sum()) / len(batch)
        measured = {**measure(name, batch, own[name]), "evaluation/response_length": length}
        metrics |= {f"{key}{ending}": value for key, value in measured.items()}
        rows = collect_rows(batch).get()
        saved += [{**row, "row": len(saved) + i} | ({"set": name} if name else {}) for i, row in enumerate(rows)]
    return Evaluation(metrics, num_rows, saved)


def _without_failed_scores(batch: Batch) -> Batch:
    """Returns a batch in which the score of a response is NaN if its reward failed. Waits for the scores.

    With `on_failure: zero`, such a score is 0. A reward model that is called directly may return NaN or infinity.
    """
    if "scores" not in batch:
        return batch
    scores_B = batch.get("scores")
    failed_B = ~scores_B.isfinite()
    if FAILED in batch:
        failed_B |= batch.get(FAILED)
    if not failed_B.any():
        return batch
    known = Batch.from_columns(rows={"scores": scores_B.masked_fill(failed_B, math.nan)})
    return batch.drop("scores").union(known)


def collect_scores(batch: Batch, config: EvaluationConfig, limits: PoolLimits) -> PromptScores:
    """Returns the scores of a generated batch, whose rows of a prompt follow each other.

    `limits` are those of the function that extracts answers.
    """
    k = config.samples
    answers = None
    if config.extract_answer is not None and k > 1:
        texts = batch.reduce(_extract, ("response",), function=config.extract_answer, limits=limits).get()
        answers = [texts[i : i + k] for i in range(0, len(texts), k)]
    sources = list(batch.get("data_source"))[::k] if "data_source" in batch else [None] * (len(batch) // k)
    return PromptScores(batch.get("scores").view(-1, k), batch.get("prompt_id")[::k].tolist(), sources, answers)


def _extract(table: TensorDict, function: str, limits: PoolLimits) -> list[str | None]:
    """Returns the final answers of responses. Runs on the task worker, which starts processes for the function."""
    return extract_answers(function, objects(table, "response"), limits)


def measure_scores(scores: PromptScores, config: EvaluationConfig) -> dict[str, float]:
    """Returns the metrics of the scores of a set of prompts. A metric is NaN if too few responses have a score."""
    interval = scores.interval(scores.means())
    metrics = {
        "accuracy": interval.value,
        "evaluation/accuracy_low": interval.low,
        "evaluation/accuracy_high": interval.high,
    }
    for name, values_P in scores.estimate(config.pass_score).items():
        metrics[f"accuracy_{name}"] = _mean_of_known(values_P)
    for source in dict.fromkeys(scores.strata or ()):
        metrics[f"{SOURCE}{source}"] = _mean_of_known(scores.of_source(source).means())
    return metrics | scores.measure_failures(config.pass_score)


def _mean_of_known(values_P: Tensor) -> float:
    known_P = ~values_P.isnan()
    return mean_over_prompts(values_P[known_P]) if known_P.any() else math.nan


def measure_episodes(table: TensorDict) -> dict[str, float]:
    """Returns the mean number of turns of episodes, and for each counted event the share of episodes in which it
    occurred. Runs on the task worker.
    """
    records = objects(table, EPISODE)
    events = sorted({name for record in records for name in record["counts"]})
    shares = {name: sum(bool(record["counts"].get(name)) for record in records) / len(records) for name in events}
    turns = sum(record["turns"] for record in records) / len(records)
    return {"evaluation/turns": turns} | {f"evaluation/environment/{name}": share for name, share in shares.items()}


def evaluate_loss(actor: "ActorGroup", examples: Batch | Mapping[str, Batch]) -> Evaluation:
    """Returns `validation_loss`, the mean cross-entropy per response token of held-out examples, in nats. Blocks.

    For named sets of examples, the names end with `/NAME`.
    """
    sets = {"": examples} if isinstance(examples, Batch) else examples
    metrics = {}
    for name, rows in sets.items():
        batch = rows.union(actor.logprobs.submit(rows))
        loss = batch.reduce(mean_loss, ("logprobs", "response_mask")).get()
        metrics[f"validation_loss/{name}" if name else "validation_loss"] = loss
    return Evaluation(metrics, sum(map(len, sets.values())))


def mean_loss(table: TensorDict) -> float:
    """Returns the mean negative log-probability of the response tokens. Runs on the task worker."""
    return -float(table["tokens", "logprobs"][table["tokens", "response_mask"]].double().mean())


class EvaluationHistory(RunObserver):
    """The first and the last evaluation of a run. The metrics file contains all evaluations."""

    def __init__(self) -> None:
        self.results: list[tuple[int, Evaluation]] = []
        """Step and result."""

    def evaluated(self, step: int, values: Mapping[str, float], rows: Sequence[Row], num_examples: int) -> None:
        self.add(step, Evaluation(values, num_examples))

    def add(self, step: int, result: Evaluation) -> None:
        """Adds the result of a step, without its rows. Several results of one step are merged."""
        num_rows = result.num_rows
        if self.has_result_of(step):
            previous = self.results.pop()[1]
            result, num_rows = Evaluation({**previous, **result}), previous.num_rows + num_rows
        if result:
            self.results = [*self.results[:1], (step, Evaluation(result, num_rows))]

    def has_result_of(self, step: int) -> bool:
        return bool(self.results) and self.results[-1][0] == step

    def summary(self, step: int) -> dict[str, float | None]:
        """Returns the entries of `summary.json`. `step` is the last step of the run."""
        names = dict.fromkeys(name for _, result in self.results for name in result)
        first = self.results[0][1] if self.results else {}
        last = self.results[-1][1] if self.has_result_of(step) else {}
        entries: dict[str, float | None] = {}
        for name in names:
            entries |= {f"{name}_before": first.get(name), f"{name}_after": last.get(name)}
        return entries | {"evaluation_rows": self.results[-1][1].num_rows if self.results else 0}

    def state(self) -> list[dict[str, Any]]:
        """Returns the results as plain values for a checkpoint. Pending evaluations are not included."""
        return [{"step": step, "metrics": dict(result), "num_rows": result.num_rows} for step, result in self.results]

    def restore(
        self,
        state: Sequence[Mapping[str, Any]],
        pending: Sequence[Sequence[int]] = (),
        records: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """Restores the result of `state`.

        Args:
            state: result of `state`.
            pending: (step, number of rows) of each evaluation that was pending.
            records: log records, which contain the results of these evaluations.
        """
        self.results = [(saved["step"], Evaluation(saved["metrics"], saved["num_rows"])) for saved in state]
        names = list(self.results[0][1]) if self.results else []
        by_step = {int(record["step"]): record for record in records} if pending else {}
        for step, num_rows in pending:
            record = by_step.get(step, {})
            # `names` are those of the first evaluation, which may have no failures.
            failures = [name for name in record if name.startswith(NUM_FAILED)]
            own = [name for name in dict.fromkeys((*names, *failures)) if name in record]
            self.add(step, Evaluation({name: record[name] for name in own}, num_rows))
