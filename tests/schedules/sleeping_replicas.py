"""Rollout and actor workers that sleep instead of computing, for runs with real Ray processes.

A replica generates a few prompts concurrently, and only while it is called.
"""

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.config import ExportConfig
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import make_tensordict, num_rows
from flowrl.data.metric import Max, Mean, Metric

COLUMNS = ("response_mask", "weight_version", "response")


@dataclass(frozen=True)
class Durations:
    """Seconds to generate a prompt: constant, or log-normal around the mean."""

    mean_s: float
    sigma: float = 0.0
    seed: int = 0

    def seconds(self, prompt: int) -> float:
        if not self.sigma:
            return self.mean_s
        chance = np.random.default_rng([self.seed, prompt])
        return float(self.mean_s * chance.lognormal(-(self.sigma**2) / 2, self.sigma))

    def batch_seconds(self, prompts: Sequence[int], slots: int) -> float:
        """Returns the seconds to generate the prompts in this order with the given slots."""
        ends = [0.0] * slots
        for prompt in prompts:
            heapq.heapreplace(ends, ends[0] + self.seconds(prompt))
        return max(ends)


class SleepingRollout(Worker):
    """Args: `slots` is the number of concurrent prompts."""

    replicated = stateless = True

    def __init__(self, durations: Durations, slots: int) -> None:
        self.durations, self.slots, self.version = durations, slots, 0
        self._todo: list[tuple[int, int]] = []
        self._working: dict[int, tuple[int, float, int]] = {}
        self._evaluation: tuple[list[int], float, int] | None = None

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("prompt_ids", "prompt_id", "sample"), writes=COLUMNS)
    def generate(self, batch: TensorDict, temperature: float | None = None) -> TensorDict:
        prompts = batch["rows", "prompt_id"].tolist()
        time.sleep(self.durations.batch_seconds(list(dict.fromkeys(prompts)), self.slots))
        return _responses([(prompt, 0, self.version, self.version) for prompt in prompts], *COLUMNS)

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False, reads=("prompt_ids", "prompt_id", "sample"))
    def add(self, batch: TensorDict, samples: int) -> None:
        self._todo += [(prompt, samples) for prompt in dict.fromkeys(batch["rows", "prompt_id"].tolist())]

    @register(Dispatch.COLLECT, blocking=False, resend=False, rows="unknown", writes=(*COLUMNS, "prompt_id", "sample"))
    def poll(self, slice_s: float) -> TensorDict:
        begun_s, rows = time.monotonic(), []
        while (self._todo or self._working) and (left := begun_s + slice_s - time.monotonic()) > 0:
            if rows and not self._todo:
                break  # a slot is free
            while self._todo and len(self._working) < self.slots:
                prompt, samples = self._todo.pop(0)
                self._working[prompt] = (samples, self.durations.seconds(prompt), self.version)
            slept_s = time.monotonic()
            time.sleep(min(left, max(0.0, min(state[1] for state in self._working.values()))))
            slept_s = time.monotonic() - slept_s
            self._working = {p: (n, s - slept_s, v) for p, (n, s, v) in self._working.items()}
            done = {p: state for p, state in self._working.items() if state[1] <= 0}
            self._working = {p: state for p, state in self._working.items() if p not in done}
            rows += [(p, i, v, self.version) for p, (n, _, v) in done.items() for i in range(n)]
        return _responses(rows, *COLUMNS, "prompt_id", "sample")

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False, reads=("prompt_ids", "prompt_id", "sample"))
    def start_evaluation(self, batch: TensorDict, temperature: float) -> None:
        prompts = batch["rows", "prompt_id"].tolist()
        left_s = self.durations.batch_seconds(prompts, max(1, self.slots // 2))
        self._evaluation = (prompts, left_s, self.version)

    @register(Dispatch.COLLECT, blocking=False, resend=False, rows="unknown", writes=COLUMNS)
    def poll_evaluation(self, slice_s: float) -> TensorDict:
        """Sleeps alone: the prompts of `poll` make no progress meanwhile."""
        prompts, left_s, version = self._evaluation or ([], 0.0, 0)
        time.sleep(max(0.0, min(slice_s, left_s)))
        if left_s > slice_s:
            self._evaluation = (prompts, left_s - slice_s, version)
            return _responses([], *COLUMNS)
        self._evaluation = None
        return _responses([(prompt, 0, version, self.version) for prompt in prompts], *COLUMNS)

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False, memory=())
    def count_waiting(self, samples: int) -> int:
        return 0

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def abort(self, prompt_ids: Sequence[int]) -> None:
        self._todo = [each for each in self._todo if each[0] not in prompt_ids]
        self._working = {prompt: state for prompt, state in self._working.items() if prompt not in prompt_ids}

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def abort_all(self) -> None:
        self._todo.clear()
        self._working.clear()

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="bucket", memory=("weights",))
    def load_weights(self, weights: Mapping[str, Any], version: int, bucket: int = 0, of: int = 1) -> None:
        self.version = version


def _responses(rows: Sequence[tuple[int, int, int, int]], *columns: str) -> TensorDict:
    """Returns rows of two tokens from (prompt, sample, version of token 1, version of token 2)."""
    table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 4)
    columns_of = {"prompt_id": table[:, 0], "sample": table[:, 1], "response": ["..."] * len(rows)}
    tokens = {
        "response_mask": torch.ones(2 * len(rows), dtype=torch.bool),
        "weight_version": table[:, 2:].reshape(-1).to(torch.int32),
    }
    selected = {name: column for name, column in columns_of.items() if name in columns}
    return make_tensordict(selected, tokens, torch.full((len(rows),), 2, dtype=torch.int64))


class SleepingActor(Worker):
    """Args: `row_s` is the duration of an update per row."""

    def __init__(self, row_s: float) -> None:
        self.row_s, self.updates = row_s, 0

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("prompt_id", "weight_version"))
    def update(self, batch: TensorDict) -> dict[str, Metric]:
        count = num_rows(batch)
        time.sleep(self.row_s * count)
        self.updates += 1
        oldest = int(batch["tokens", "weight_version"].min()) if count else self.updates
        return {"rows": Mean(float(count), 1), "oldest": Max(float(self.updates - 1 - oldest))}

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def num_buckets(self, bucket_mb: float, dtype: str | None = None) -> int:
        return 2

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def weights(self, bucket: int = 0, bucket_mb: float | None = None, dtype: str | None = None) -> dict[str, Any]:
        return {"weight": np.full(4, float(self.updates))}

    @register(Dispatch.RANK_ZERO)
    def save(self, folder: Path, config: ExportConfig) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(self.updates))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: Path, asynchronous: bool) -> None:
        (folder / f"updates-{self.rank}").write_text(str(self.updates))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: Path) -> None:
        self.updates = int((folder / f"updates-{self.rank}").read_text())
