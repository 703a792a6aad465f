"""Scores responses for best of N, with a reward function in separate processes or with a reward model."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flowrl.config import ModelConfig, Placement, RewardConfig
from flowrl.controller.cluster import Cluster
from flowrl.data.batch.batch import Batch
from flowrl.inference.model_source import ModelSource
from flowrl.inference.text_generator import GeneratedText
from flowrl.rewards.row_scorer import RowScorer
from flowrl.workers import Reward

_MODEL_ROWS = 64
"""Number of responses that a reward model scores together."""

Columns = Mapping[str, Any]  # Any: columns of a row


class ResponseScorer(Protocol):
    """Scores responses. The scores of a reward model arrive after `flush`, or when enough responses wait."""

    def submit(self, columns: Columns, response: GeneratedText) -> Future[float]:
        """Returns the future score of a response. `columns` is the result of `reward_columns` for the prompt."""
        ...

    def flush(self) -> None:
        """Scores the responses that still wait."""
        ...

    def close(self) -> None: ...


def open_scorer(reward: str, policy: ModelSource) -> ResponseScorer:
    """Returns the scorer of a reward that `read_job` has checked. Close it at the end."""
    folder = Path(reward)
    return ModelScorer(folder, policy) if folder.is_dir() else FunctionScorer(reward)


class FunctionScorer:
    """Calls a reward function in separate processes, while other responses are generated."""

    def __init__(self, function: str) -> None:
        config = RewardConfig(function=function)
        self._scorer = RowScorer(config, workers=config.workers)

    def submit(self, columns: Columns, response: GeneratedText) -> Future[float]:
        score: Future[float] = Future()
        row = {
            **columns,
            "response": response.text,
            "tagged_response": response.tagged_text,
            "token_ids": list(response.token_ids),
            "finish_reason": response.finish_reason,
        }

        def set_score(scored: Future[Any]) -> None:
            if (error := scored.exception()) is not None:
                score.set_exception(error)
            else:
                score.set_result(scored.result().values["scores"])

        self._scorer.submit(row).add_done_callback(set_score)
        return score

    def flush(self) -> None:
        """Does nothing, because `submit` has already started all calls."""

    def close(self) -> None:
        self._scorer.close()


class ModelScorer:
    """Scores responses with a reward model in this process."""

    def __init__(self, folder: Path, policy: ModelSource) -> None:
        config = RewardConfig(model=ModelConfig(path=folder, dropout=0))
        config = config.of_policy(policy.tokenizer_path, None)
        placement = Placement(pools={"main": (1,)}, roles={"reward": "main"})
        with ExitStack() as resources:
            cluster = resources.enter_context(Cluster(placement, backend="inline"))
            self._group = cluster.group("reward", Reward, config)
            self._resources = resources.pop_all()
        self._waiting: list[tuple[Columns, GeneratedText, Future[float]]] = []

    def submit(self, columns: Columns, response: GeneratedText) -> Future[float]:
        score: Future[float] = Future()
        self._waiting.append((columns, response, score))
        if len(self._waiting) >= _MODEL_ROWS:
            self.flush()
        return score

    def flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        batch = _make_batch([columns for columns, _, _ in waiting], [response for _, response, _ in waiting])
        scores = self._group.score(batch).get("scores").tolist()
        for (_, _, future), score in zip(waiting, scores, strict=True):
            future.set_result(score)

    def close(self) -> None:
        self._resources.close()


def _make_batch(rows: Sequence[Columns], responses: Sequence[GeneratedText]) -> Batch:
    """Returns the columns that a reward model reads."""
    tokens = [(*response.request.token_ids, *response.token_ids) for response in responses]
    masks = [[i >= len(r.request.token_ids) for i in range(len(ids))] for r, ids in zip(responses, tokens, strict=True)]
    return Batch.from_columns(
        rows={
            "prompt": [row["prompt"] for row in rows],
            "conversation": [row["conversation"] for row in rows],
            "response": [response.text for response in responses],
            "truncated": np.array([response.finish_reason == "length" for response in responses]),
        },
        tokens={"input_ids": np.concatenate(tokens), "response_mask": np.concatenate(masks)},
        lengths=[len(ids) for ids in tokens],
    )
