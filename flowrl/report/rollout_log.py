"""The generated text of a run: one JSON-lines shard in `rollouts/` per saved step and kind of rows.

Only the driver writes shards. A shard is written completely or not at all, and its name contains its step. A resumed
run therefore replaces the shards of the steps that it repeats. docs/generated_text.md describes the format.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flowrl.checkpoints.run_folder import replacing
from flowrl.config import RolloutLogConfig, UserError
from flowrl.config.source import parse_json
from flowrl.data.metric import finite

Kind = Literal["training", "evaluation"]
"""`training`: a few rows of a step's batch. `evaluation`: all rows of an evaluation."""

Row = dict[str, Any]  # Any: the value of a column
"""One response, with the columns of `COLUMNS`."""

COLUMNS: dict[str, str] = {
    "step": "training step; 0 is the evaluation before training",
    "kind": "`training` or `evaluation`",
    "row": "index of the row in the batch of the step, or in the evaluation",
    "set": "evaluations of `data.tests`: name of the set",
    "prompt_id": "index of the prompt in the prompt stream, or in the test file",
    "sample": "index among the responses to the same prompt",
    "prompt": "last user message; with an environment, the last message that `reset` returned, or the text of its "
    "tokens",
    "response": "response text, as a reward function receives it",
    "segments": "with an environment: parts of the response, each with `kind` (`policy` or `environment`), `start` and "
    "`end` (response tokens) and `text` (with special tokens)",
    "answer": "column `answer` of the dataset",
    "finish_reason": "`stop` (stop token) or `length` (length limit)",
    "response_length": "number of response tokens that the policy sampled",
    "environment_length": "number of response tokens of an environment",
    "version": "weight version that sampled the oldest response token",
    "newest_version": "weight version that sampled the newest response token",
    "staleness": "version of the weights that the step trained, minus `version`; null in an evaluation",
    "score": "weighted sum of the rewards; in an evaluation, of the rewards for evaluations, and null if one of them "
    "failed",
    "rewards": "score of each reward by its name, before its weight; null if its call failed",
    "other_scores": "other float columns of the batch with one value per row, such as `shaped_scores`",
    "reward_failures": "cause of each failed reward, by the name of the reward; `{}` if no reward failed",
    "advantage": "mean advantage over the sampled response tokens",
    "tokens": "for `token_rows` rows of a step: values per response token, see below",
}
"""Columns of a row and their meanings. docs/generated_text.md contains the same table."""

TOKEN_VALUES: dict[str, str] = {
    "text": "decoded token; a character of several tokens is in the last of them, and the others are empty",
    "ids": "token id",
    "mask": "1 for a token that the policy sampled, 0 for a token of an environment",
    "logprobs": "log-probability under the trained weights, before the update (`old_logprobs`)",
    "rollout_logprobs": "log-probability under the sampling distribution",
    "ref_logprobs": "log-probability under the reference",
    "values": "value of the critic",
    "advantages": "advantage",
    "ratios": "exp(`logprobs` - `rollout_logprobs`)",
    "versions": "weight version that sampled the token",
}
"""Lists of the column `tokens` and the meanings of their values. docs/generated_text.md contains the same table."""

NUM_SHOWN_ROWS = 64
"""Largest number of rows of a step that trackers receive."""

_SHARD_NAME = re.compile(rf"({'|'.join(get_args(Kind))})-(\d+)\.jsonl")

_NUM_NEAREST = 5
"""Number of saved steps that an error message names."""


@dataclass(frozen=True)
class EncodedRows:
    """Rows of one shard. A task worker encodes them, so that the driver only writes the lines."""

    kind: Kind
    step: int
    lines: bytes
    """The rows as JSON lines."""
    shown: list[Row]
    """The first `NUM_SHOWN_ROWS` rows, without the column `tokens`, for trackers."""


def encode_rows(kind: Kind, step: int, rows: Sequence[Row]) -> EncodedRows:
    """Converts the rows of a step to JSON lines."""
    location = {"step": step, "kind": kind}  # first in the line, whatever the row contains
    lines = b"".join(_to_line(location | row | location) for row in rows)
    return EncodedRows(kind, step, lines, [row | location | {"tokens": None} for row in rows[:NUM_SHOWN_ROWS]])


class RolloutLogError(UserError):
    """Raised if the requested rows of a run do not exist or cannot be read."""


class MissingStepError(RolloutLogError):
    """Raised if the rows of a step are not saved. An active run may remove rows (`max_mb`) while they are read."""


class RolloutLog:
    """Writes the generated text of a run, and removes the oldest shards if `max_mb` is exceeded."""

    def __init__(self, folder: Path, config: RolloutLogConfig | None, last_step: int = -1) -> None:
        """Opens `folder` (`RunFolder.rollouts`). With a `config` of None, nothing is written.

        Removes the shards of the steps after `last_step`, which a resumed run repeats, and incomplete files.
        """
        self._folder, self._config = folder, config
        self._sizes: dict[tuple[int, Kind], int] = {}
        """Bytes of each shard, in the order in which the shards are removed."""
        for path in folder.glob(".*.tmp"):
            path.unlink()
        for step, kind in sorted(_find_shards(folder)):
            path = shard_path(folder, kind, step)
            if step > last_step:
                path.unlink()
            else:
                self._sizes[step, kind] = path.stat().st_size
        self._num_bytes = sum(self._sizes.values())

    @property
    def is_enabled(self) -> bool:
        return self._config is not None

    def training_settings(self, step: int) -> RolloutLogConfig | None:
        """Returns the settings for the training rows of a step, or None if they are not saved."""
        config = self._config
        if config is None or not config.every:
            return None
        return config if step == 1 or step % config.every == 0 else None

    def write(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        """Writes rows as the shard of a step."""
        self.write_encoded(encode_rows(kind, step, rows))

    def write_encoded(self, rows: EncodedRows) -> None:
        """Writes a shard atomically. Replaces an earlier shard of the same step and kind."""
        assert self._config is not None, "rollouts are not saved"
        shard = (rows.step, rows.kind)
        self._folder.mkdir(exist_ok=True)
        with replacing(shard_path(self._folder, rows.kind, rows.step)) as temporary:
            temporary.write_bytes(rows.lines)
        self._num_bytes += len(rows.lines) - self._sizes.pop(shard, 0)
        self._sizes[shard] = len(rows.lines)
        if self._config.max_mb is not None and self._num_bytes > self._config.max_mb * 1e6:
            self._prune(self._config.max_mb * 1e6)

    def _prune(self, max_bytes: float) -> None:
        evaluations = [shard for shard in self._sizes if shard[1] == "evaluation"]
        latest_training = [shard for shard in self._sizes if shard[1] == "training"][-1:]
        kept = {*evaluations[:1], *evaluations[-1:], *latest_training}
        for step, kind in list(self._sizes):
            if self._num_bytes <= max_bytes:
                return
            if (step, kind) not in kept:
                # A user may have removed the file.
                shard_path(self._folder, kind, step).unlink(missing_ok=True)
                self._num_bytes -= self._sizes.pop((step, kind))


def evenly_spaced(count: int, total: int) -> list[int]:
    """Returns at most `count` indices at equal distances from the first to the last of `total` rows."""
    count = min(count, total)
    return [i * (total - 1) // max(1, count - 1) for i in range(count)]


# Reading.


def saved_steps(folder: Path, kind: Kind) -> list[int]:
    """Returns the steps with rows of this kind, in ascending order. `folder` is `RunFolder.rollouts`."""
    return sorted(step for step, own in _find_shards(folder) if own == kind)


def read_rows(folder: Path, kind: Kind, step: int) -> list[Row]:
    """Returns the saved rows of a step. Columns that the file lacks, because an earlier version of flowrl wrote it, are
    None.

    Raises MissingStepError if the step is not saved, and RolloutLogError if its shard is corrupt.
    """
    path = shard_path(folder, kind, step)
    try:
        # JSON escapes line breaks in text, except characters such as U+2028, which `splitlines` would split.
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise MissingStepError(_missing_step(folder, kind, step)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RolloutLogError(f"{path} cannot be read ({error}): remove it, or choose another step") from error
    if not lines[0]:
        raise RolloutLogError(f"{path} is empty: choose another step")
    return [parse_line(path, number, line) for number, line in enumerate(lines, start=1) if line]


def count_rows(folder: Path, kind: Kind, step: int) -> int:
    """Returns the number of saved rows of a step without parsing them; 0 if they cannot be read."""
    try:
        return shard_path(folder, kind, step).read_bytes().count(b"\n")
    except OSError:
        return 0


def _missing_step(folder: Path, kind: Kind, step: int) -> str:
    steps, other = saved_steps(folder, kind), "evaluation" if kind == "training" else "training"
    other_steps = saved_steps(folder, other)
    option = f"{'add' if kind == 'training' else 'omit'} --evaluation"
    if not steps:
        fix = f"{option} for its {other} rows" if other_steps else "report.rollouts may be null, or no step is complete"
        return f"{folder} has no {kind} rows: {fix}"
    nearest = sorted(sorted(steps, key=lambda saved: abs(saved - step))[:_NUM_NEAREST])
    return (
        f"{folder} has no {kind} rows of step {step}: choose one of its {len(steps)} saved steps (nearest: "
        f"{', '.join(map(str, nearest))})" + (f", or {option}" if step in other_steps else "")
    )


def parse_line(path: Path, number: int, line: str) -> Row:
    """Returns the row of a line of a shard. Missing columns are None. Raises RolloutLogError if the line is no JSON
    object.
    """
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise RolloutLogError(f"{path}, line {number} is not a JSON object: choose another step")
    return dict.fromkeys(COLUMNS) | row


def _to_line(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(finite(row), ensure_ascii=False, allow_nan=False, default=str, separators=(",", ":"))
    # An unpaired surrogate of a dataset has no UTF-8 encoding. Its replacement is the JSON escape of the character.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def shard_path(folder: Path, kind: Kind, step: int) -> Path:
    """Returns the file of the rows of a step."""
    return folder / f"{kind}-{step:06d}.jsonl"


def _find_shards(folder: Path) -> Iterable[tuple[int, Kind]]:
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            if match := _SHARD_NAME.fullmatch(path.name):
                yield int(match[2]), match[1]  # pyright: ignore[reportReturnType] (the pattern contains the kinds)
