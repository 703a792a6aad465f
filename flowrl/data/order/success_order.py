"""Selects prompts by their measured success: a difficulty filter and a curriculum."""

import base64
import math
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.config import DifficultyConfig
from flowrl.data.messages import DataError
from flowrl.data.order.epoch_order import EpochOrder

HALF_LIFE_EPOCHS = 1.0
"""Number of epochs of drawn prompts after which a measurement counts half, because the policy has changed."""

_RANDOM_STREAM = 0x5CC
"""Part of the seed of a draw, so that its random numbers differ from those of the order of an epoch."""


class SuccessOrder:
    """Draws positions of an `EpochOrder`, and skips positions by the measured success of their rows.

    The filter skips a row whose success is outside of [min, max]. With probability `revisit`, it accepts the row
    anyway, because the policy may have changed since the measurement. Zheng et al. 2025 (GRESO),
    https://arxiv.org/abs/2506.02177, skip prompts in the same way. Their probability depends on the number of
    measurements.

    The curriculum draws the most informative of several candidates. The success of a candidate is unknown, with a
    posterior Beta(1 + successes, 1 + failures). The curriculum samples a success from each posterior (Thompson
    sampling) and selects the candidate whose sample is closest to 1/2. There, the variance p (1 - p) of the scores of a
    group is largest. Qu et al. 2025 (MoPPS), https://arxiv.org/abs/2507.04632, section 3. Deviations: the candidates of
    a prompt do not depend on the number of prompts per step, measurements decay with time instead of with the number of
    measurements, and prompts in flight are selected last.

    A draw depends only on the seed, the index of the prompt and the success recorded before. The order of past draws is
    part of the state, so that a prompt index always refers to the same row.
    """

    def __init__(
        self,
        order: EpochOrder,
        num_rows: int,
        *,
        seed: int,
        difficulty: DifficultyConfig,
        num_candidates: int = 1,
        samples: int = 1,
        initial: np.ndarray | None = None,
    ) -> None:
        """Starts with no draws.

        Args:
            order: the order of the candidates.
            num_rows: number of rows of the dataset.
            seed: seed of the random choices.
            difficulty: bounds of the filter, and the probability of a revisit.
            num_candidates: number of rows from which each prompt is selected. 1 disables the curriculum.
            samples: number of responses per prompt. A measurement has this weight.
            initial: float [num_rows], the initial success of each row, or NaN if it is unknown. It counts as a
                measurement.
        """
        self._order, self._seed, self._difficulty = order, seed, difficulty
        self._num_candidates, self._samples = num_candidates, samples
        self._positions = array("q")
        """Position in `order` of each draw."""
        self._num_examined = 0
        """Number of positions that were candidates of past draws."""
        is_known = np.zeros(num_rows, dtype=bool) if initial is None else np.isfinite(initial)
        self._successes = np.zeros(num_rows, dtype=np.float32)
        """Sum of the scores of the measurements, with decaying weights."""
        self._trials = np.where(is_known, np.float32(samples), np.float32(0))
        """Number of responses in `_successes`, with the same weights."""
        if initial is not None:
            self._successes[is_known] = samples * initial[is_known]
        self._measured_at = np.full(num_rows, -1, dtype=np.int32)
        """Index of the latest measured prompt of each row."""
        self._drawn_at = np.full(num_rows, -1, dtype=np.int32)
        """Index of the latest drawn prompt of each row."""

    def __len__(self) -> int:
        """Returns the number of draws."""
        return len(self._positions)

    @property
    def estimates(self) -> np.ndarray:
        """float [num_rows], measured success of each row, or NaN before the first measurement."""
        return np.divide(
            self._successes, self._trials, out=np.full_like(self._successes, np.nan), where=self._trials > 0
        )

    def position(self, prompt_id: int) -> int:
        """Returns the position of a drawn prompt in the order of the candidates."""
        return self._positions[prompt_id]

    def draw(self) -> None:
        """Draws the next prompt. Raises DataError if the filter skips every row of an epoch."""
        prompt_id = len(self)
        random = np.random.default_rng([self._seed, _RANDOM_STREAM, prompt_id])
        positions = self._next_candidates(random)
        rows = np.array([self._order.row(position) for position in positions])
        best = 0
        if len(rows) > 1:
            distances = np.abs(self._sample_success(rows, prompt_id, random) - 0.5)
            best = int(np.lexsort((distances, self._is_in_flight(rows, prompt_id)))[0])
        self._drawn_at[rows[best]] = prompt_id
        self._positions.append(positions[best])

    def _next_candidates(self, random: np.random.Generator) -> list[int]:
        """Returns the positions of the next candidates that the filter accepts, at least one."""
        accepted: list[int] = []
        end = self._num_examined + len(self._order)
        while len(accepted) < self._num_candidates and self._num_examined < end:
            row = self._order.row(self._num_examined)
            if self._is_in_range(row) or random.random() < self._difficulty.revisit:
                accepted.append(self._num_examined)
            self._num_examined += 1
        if not accepted and not self._difficulty.revisit:
            low, high = self._difficulty.bounds
            raise DataError(
                f"the measured success of every prompt is outside of data.difficulty, {low:g} to {high:g}: widen the "
                f"range, set data.difficulty.revisit above 0, or end the run"
            )
        # If `revisit` is small, the filter may skip a whole epoch. The last examined position is then accepted.
        return accepted or [self._num_examined - 1]

    def _is_in_range(self, row: int) -> bool:
        if not self._trials[row]:
            return True
        low, high = self._difficulty.bounds
        return low <= float(self._successes[row] / self._trials[row]) <= high

    def _sample_success(self, rows: np.ndarray, prompt_id: int, random: np.random.Generator) -> np.ndarray:
        """Returns a sample of the success of each row from its posterior."""
        trials = self._trials[rows].astype(np.float64)
        rates = np.divide(self._successes[rows], trials, out=np.zeros_like(trials), where=trials > 0).clip(0, 1)
        trials *= self._decay(prompt_id - self._measured_at[rows])
        return random.beta(1 + rates * trials, 1 + (1 - rates) * trials)

    def _decay(self, ages: np.ndarray) -> np.ndarray:
        return 0.5 ** (ages.clip(0) / (HALF_LIFE_EPOCHS * len(self._order)))

    def _is_in_flight(self, rows: np.ndarray, prompt_id: int) -> np.ndarray:
        """Returns whether each row was drawn in the last epoch of draws and is not measured yet."""
        drawn_at = self._drawn_at[rows]
        return (drawn_at > self._measured_at[rows]) & (drawn_at >= prompt_id - len(self._order))

    def record(self, prompt_ids: Sequence[int], success: Sequence[float]) -> None:
        """Adds the measured success of drawn prompts. Ignores NaN, the success of a group without scores."""
        for prompt_id, score in zip(prompt_ids, success, strict=True):
            if math.isnan(score):
                continue
            row = self._order.row(self.position(prompt_id))
            decay = float(self._decay(np.asarray(prompt_id - int(self._measured_at[row]))))
            self._successes[row] = decay * float(self._successes[row]) + self._samples * score
            self._trials[row] = decay * float(self._trials[row]) + self._samples
            self._measured_at[row] = max(int(self._measured_at[row]), prompt_id)

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON values. Arrays are compressed."""
        positions = np.frombuffer(self._positions, dtype=np.int64) if self._positions else np.zeros(0, np.int64)
        return {
            "num_examined": self._num_examined,
            # Differences are small numbers, which compress better.
            "positions": _pack(np.diff(positions, prepend=0).astype(np.int32)),
            "successes": _pack(self._successes),
            "trials": _pack(self._trials),
            "measured_at": _pack(self._measured_at),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state` of an order with the same arguments."""
        self._num_examined = state["num_examined"]
        positions = np.cumsum(_unpack(state["positions"], np.int32), dtype=np.int64)
        self._positions = array("q", positions.tobytes())
        self._successes = _unpack(state["successes"], np.float32)
        self._trials = _unpack(state["trials"], np.float32)
        self._measured_at = _unpack(state["measured_at"], np.int32)
        self._drawn_at = np.full_like(self._measured_at, -1)
        epochs, offsets = np.divmod(positions, len(self._order))
        for epoch in np.unique(epochs).tolist():
            drawn = np.flatnonzero(epochs == epoch)
            np.maximum.at(self._drawn_at, self._order.rows(epoch)[offsets[drawn]], drawn.astype(np.int32))


def _pack(values: np.ndarray) -> str:
    """Returns an array as compressed text. JSON numbers would take several times the space."""
    return base64.b64encode(zlib.compress(values.tobytes(), 1)).decode("ascii")


def _unpack(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype).copy()
