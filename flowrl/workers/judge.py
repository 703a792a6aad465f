"""Judge worker, which scores responses with a language model that generates verdicts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from flowrl.config import JudgeConfig, UserError
from flowrl.controller.worker import Arguments, Contract, Dispatch, Worker, register
from flowrl.data.batch.tensordicts import make_tensordict, num_rows, objects
from flowrl.data.chat import ChatTokenizer, Message
from flowrl.engines.models.loading import ModelError
from flowrl.engines.models.partial_loading import WeightDifferences
from flowrl.engines.rollout.adapted_weights import start_engine
from flowrl.engines.rollout.base import (
    TAGS,
    EngineContext,
    PromptError,
    Request,
    RolloutEngine,
    SleepingEngine,
)
from flowrl.engines.rollout.sampling import row_keys
from flowrl.rewards.judgments import Comparison, find_opponents, load_verdict, render_prompt, share_of_wins
from flowrl.workers.model_worker import model_differences

if TYPE_CHECKING:
    from flowrl.workers.groups import JudgeGroup

_SEED = 0x4A55_4447 << 32
"""Value that is added to the seed, so that the random numbers of verdicts differ from those of responses."""

_MAX_SAMPLES = 2**20
"""Upper bound of the number of samples of a prompt. Used to combine two sample indices to one number."""

Columns = Mapping[str, Any]
"""Row columns of one response, by name."""


@dataclass(frozen=True)
class _Judgment:
    """Verdict on one prompt."""

    score: float | None
    """Score of the verdict. None if the prompt is too long, or if the text has no verdict."""
    text: str


def group_compared_rows(contract: Contract, cls: type[Worker], arguments: Arguments, config: JudgeConfig) -> Contract:
    """Returns the contract of `score`, for `register(resolve=...)`. If responses to a prompt are compared with each
    other, the rows of a prompt are sent to the same rank.
    """
    is_grouped = config.kind == "pairwise" and config.compare_with is None
    return replace(contract, groups="prompt_id") if is_grouped else contract


class Judge(Worker["JudgeGroup"]):
    """Worker that scores responses with a language model, its own tokenizer and its own chat template.

    The model reads a response, or two responses to the same prompt, and generates a text with a verdict.

    Args:
        config: model, engine, prompt and verdict.
        seed: random seed. Random numbers depend only on seed, `prompt_id` and `sample` (of both responses).
    """

    replicated = stateless = True

    def __init__(self, config: JudgeConfig, *, seed: int) -> None:
        self._config, self._seed = config, seed
        self._prompt, self._parse = _read_prompt(config), load_verdict(config.applied_verdict)
        self.tokenizer = ChatTokenizer(config.model.tokenizer_path, config.template, model=config.model.path)
        self.tokenizer.check_chat_template()
        settings = config.generation.model_copy(update={"stop_ids": self.tokenizer.stop_ids})
        if (differences := self.weight_differences()).missing:
            raise ModelError(
                f"{config.model.path} {differences.describe()}, and verdicts of untrained weights are meaningless: use "
                f"a complete folder"
            )
        context = EngineContext(
            config=settings,
            model=config.model,
            tokenizer=self.tokenizer.tokenizer,
            device=self.device,
            replica=self.context.replica,
            followers=self.context.followers,
            address=self.context.address,
            can_sleep=self.context.can_offload,
        )
        self.engine: RolloutEngine = start_engine(context)

    @register(Dispatch.RANK_ZERO, memory=())
    def weight_differences(self) -> WeightDifferences:
        """Returns the names of missing and unexpected weights in the model's files. Empty with `model.strict: true`."""
        return model_differences("policy", self._config.model)

    @classmethod
    def user_functions(cls, config: JudgeConfig, *_: Any, **__: Any) -> tuple[str, ...]:  # Any: the constructor's
        return tuple(config.functions.values())

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("prompt_id", "sample?", "prompt", "response", "answer?", "data_source?", "conversation?", "*"),
        writes=("scores", "failed", "judgment"),
        resolve=group_compared_rows,
    )
    def score(self, batch: TensorDict) -> TensorDict:
        """Returns one score per row, `[B]`.

        For a row without a valid verdict, `failed` is true and the score is 0. A row also fails if its prompt is too
        long for the model, because no response is judged in part. `judgment` is the text of the verdicts.
        """
        rows = list(_iterate_rows(batch))
        judgments = self._compare(rows) if self._config.kind == "pairwise" else self._rate(rows)
        scores_B = torch.tensor([judgment.score or 0.0 for judgment in judgments], dtype=torch.float32)
        failed_B = torch.tensor([judgment.score is None for judgment in judgments], dtype=torch.bool)
        return make_tensordict({"scores": scores_B, "failed": failed_B, "judgment": [j.text for j in judgments]})

    def _rate(self, rows: Sequence[Columns]) -> list[_Judgment]:
        return self._generate(rows, [(row["prompt_id"], row["sample"]) for row in rows])

    def _compare(self, rows: Sequence[Columns]) -> list[_Judgment]:
        """Returns a judgment per row, whose score is the share of wins. The model judges both orders of a pair."""
        config, comparisons = self._config, self._find_comparisons(rows)
        prompts: list[Columns] = []
        keys: list[tuple[int, int]] = []
        for comparison in comparisons:
            row = rows[comparison.row]
            other = None if comparison.opponent is None else rows[comparison.opponent]
            texts = row["response"], _column(row, str(config.compare_with)) if other is None else other["response"]
            samples = row["sample"], _MAX_SAMPLES - 1 if other is None else other["sample"]
            for first, second in ((0, 1), (1, 0)):
                prompts.append({**row, "response_a": texts[first], "response_b": texts[second]})
                keys.append((row["prompt_id"], samples[first] * _MAX_SAMPLES + samples[second]))
        judgments = self._generate(prompts, keys)
        # A user's parser may return any number.
        scores = [None if j.score is None or not 0 <= j.score <= 1 else j.score for j in judgments]
        shares = share_of_wins(len(rows), comparisons, list(zip(scores[::2], scores[1::2], strict=True)))
        texts_of: list[list[str]] = [[] for _ in rows]
        for comparison, forward, backward in zip(comparisons, judgments[::2], judgments[1::2], strict=True):
            for row, opponent in ((comparison.row, comparison.opponent), (comparison.opponent, comparison.row)):
                if row is not None:
                    name = config.compare_with if opponent is None else f"sample {rows[opponent]['sample']}"
                    first, second = (forward, backward) if row == comparison.row else (backward, forward)
                    texts_of[row] += [f"as A, with {name} as B: {first.text}", f"as B, with {name} as A: {second.text}"]
        empty = ["there is no other response to compare with"]
        return [_Judgment(share, "\n\n".join(texts or empty)) for share, texts in zip(shares, texts_of, strict=True)]

    def _find_comparisons(self, rows: Sequence[Columns]) -> list[Comparison]:
        if self._config.compare_with is not None:
            return [Comparison(row, None) for row in range(len(rows))]
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row["prompt_id"], []).append(index)
        comparisons = []
        for members in groups.values():
            members.sort(key=lambda index: rows[index]["sample"])
            pairs = find_opponents(len(members), self._config.max_comparisons)
            comparisons += [Comparison(members[i], members[j]) for i, j in pairs]
        return comparisons

    def _generate(self, rows: Sequence[Columns], keys: Sequence[tuple[int, int]]) -> list[_Judgment]:
        """Returns the judgment on each row's prompt. `keys` has a different key for each prompt, which selects its
        random numbers.
        """
        if not rows:
            return []
        prompt_ids, indices = torch.tensor(keys, dtype=torch.int64).unbind(-1)
        seeds = row_keys(self._seed + _SEED, prompt_ids, indices).tolist()
        requests = [
            Request(f"judge-{index}", self._encode(row), key, temperature=self._config.temperature or 0)
            for index, (row, key) in enumerate(zip(rows, seeds, strict=True))
        ]
        judgments: dict[str, _Judgment] = {}
        while requests:
            try:
                responses = self.engine.generate(requests)
            except PromptError as error:
                judgments[requests.pop(error.row).request_id] = _Judgment(None, f"the judge's prompt {error.reason}")
                continue
            texts = self.tokenizer.decode_responses([response.token_ids for response in responses])
            for response, text in zip(responses, texts, strict=True):
                judgments[response.request_id] = _Judgment(self._parse(text), text)
            break
        return [judgments[f"judge-{index}"] for index in range(len(rows))]

    def _encode(self, row: Columns) -> list[int]:
        try:
            text = render_prompt(self._prompt, row)
        except KeyError as error:
            raise _missing_column(str(error.args[0]), row) from error
        system = () if self._config.system is None else (Message("system", self._config.system),)
        return self.tokenizer.encode_prompt([*system, Message("user", text)])

    # Device memory.

    @classmethod
    def can_offload_device(cls, device: str, config: JudgeConfig, *_: Any, **__: Any) -> bool:  # Any: the constructor's
        return config.generation.can_sleep(on_gpus=device != "cpu")

    def offload(self, *, keep_weights: bool) -> None:
        if self.context.can_offload and self._sleeping.asleep != TAGS:
            self._sleeping.sleep()

    def onload(self) -> None:
        if self.context.can_offload and self._sleeping.asleep:
            self._sleeping.wake()

    @property
    def _sleeping(self) -> SleepingEngine:
        assert isinstance(self.engine, SleepingEngine), "a process that offloads requires an engine with `sleep`"
        return self.engine


def _read_prompt(config: JudgeConfig) -> str:
    try:
        return config.read_prompt()
    except ValueError as error:
        raise UserError(f"judge: {error}") from error


def _iterate_rows(batch: TensorDict) -> Iterator[Columns]:
    names = [name for name in batch["rows"].keys() if name != "length"]  # noqa: SIM118 (a TensorDict)
    columns = {name: objects(batch, name) for name in names}
    for index in range(num_rows(batch)):
        yield {"sample": 0} | {name: values[index] for name, values in columns.items()}


def _column(row: Columns, name: str) -> Any:  # Any: a column has any type
    if name not in row:
        raise _missing_column(name, row)
    return row[name]


def _missing_column(name: str, row: Columns) -> UserError:
    return UserError(
        f"the judge reads the column {name}, which the rows do not have: use one of {', '.join(sorted(row))} in the "
        f"judge's prompt and compare_with, or add the column to the data"
    )
