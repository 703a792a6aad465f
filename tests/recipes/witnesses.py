"""A rollout and an actor that log the prompts of which they generated or trained rows.

Importable, so that Ray's processes find them.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from flowrl.controller.worker import Dispatch, register
from flowrl.data.metric import Metric
from flowrl.workers import Actor, Loss, Rollout
from flowrl.workers.losses.loss import LossFunction
from flowrl.workers.model_worker import resolve_loss


def note(diary: Path, rank: int, batch: TensorDict) -> None:
    """Appends a line with a rank and the prompts of its rows. Short lines of several processes do not interleave."""
    with diary.open("a") as file:
        file.write(json.dumps([rank, batch["rows", "prompt_id"].tolist()]) + "\n")


def ranks_of(diary: Path) -> dict[int, set[int]]:
    """Returns the ranks per prompt."""
    ranks_by_prompt: defaultdict[int, set[int]] = defaultdict(set)
    for line in diary.read_text().splitlines():
        rank, prompts = json.loads(line)
        for prompt in prompts:
            ranks_by_prompt[prompt].add(rank)
    return dict(ranks_by_prompt)


class WritingRollout(Rollout):
    """Args: `diary` is a file to which every rank appends the prompts that it receives."""

    def __init__(self, *args: Any, diary: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.diary = diary

    @register(Dispatch.ONE_TO_ALL, blocking=False, reads=("prompt_ids", "prompt_id", "sample"), resend=False)
    def add(self, batch: TensorDict, samples: int) -> None:
        note(self.diary, self.rank, batch)
        super().add(batch, samples)


class WritingActor(Actor):
    """Args: `diary` is a file to which every rank appends the prompts that it trains on."""

    def __init__(self, *args: Any, diary: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.diary = diary

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("prompt_id",), resolve=resolve_loss)
    def update(self, batch: TensorDict, loss: Loss | LossFunction | None = None) -> dict[str, Metric]:
        note(self.diary, self.rank, batch)
        return super().update(batch, loss)
