"""Saves the rows of flowrl/report/rollout_log.py: selects rows of a batch, and converts them on the task worker."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from tensordict import TensorDict

from flowrl.config import RolloutLogConfig, RunConfig
from flowrl.config.roles import TrainedConfig
from flowrl.controller.dispatch import Future
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.fields import FIELDS
from flowrl.data.batch.tensordicts import environment_lengths, lengths, num_rows, objects
from flowrl.data.chat import ChatTokenizer
from flowrl.report.rollout_log import EncodedRows, Kind, RolloutLog, Row, encode_rows, evenly_spaced
from flowrl.report.run_observer import RunObserver
from flowrl.rewards.row_scorer import CALLS
from flowrl.workers.dialogs import EPISODE
from flowrl.workers.episodes import SEGMENTS

_REQUIRED_COLUMNS = ("prompt", "response")

_OPTIONAL_COLUMNS = (
    "answer",
    "prompt_id",
    "sample",
    "truncated",
    "response_mask",
    "weight_version",
    "scores",
    CALLS,
    EPISODE,
    SEGMENTS,
    "shaped_scores",
    "advantages",
)

_TOKEN_VALUES = {
    "logprobs": "old_logprobs",
    "rollout_logprobs": "rollout_logprobs",
    "ref_logprobs": "ref_logprobs",
    "values": "values",
    "advantages": "advantages",
    "versions": "weight_version",
}
"""Name of a list in `tokens` -> its column."""

_REPLACEMENT = "\ufffd"
"""Character that a decoder returns for bytes that are not (yet) a character."""

_CONTEXT = 8
"""Number of earlier tokens that are decoded together with a token, because its text depends on them. A character of 4
bytes has at most 4 tokens.
"""

_MAX_PENDING = 8
"""Largest number of consecutive tokens without text, after which their bytes are not the beginning of a character."""

_NUM_DIGITS = 5
"""Number of significant digits of a saved value."""

TokenLists = dict[str, list]
"""Value of the column `tokens` of one row: lists of equal length."""


def collect_rows(batch: Batch) -> Future | LocalRef:
    """Returns a future of all rows of a batch, as a list of `Row`. Does not block.

    Raises ColumnError if the batch lacks `prompt` or `response`.
    """
    selected = _select_columns(batch)
    return selected.reduce(make_rows, selected.columns, indices=list(range(batch.num_rows)))


def collect_training_rows(
    batch: Batch, settings: RolloutLogConfig, step: int, *, version: int, tokenizer: str | None
) -> Future | LocalRef:
    """Returns a future of the `EncodedRows` of a step. Does not block.

    Only the selected rows are sent to the task worker, and token columns only for the rows with `tokens`. Raises
    ColumnError if the batch lacks `prompt` or `response`.

    Args:
        batch: batch of the step, with the scores and advantages.
        settings: number of rows.
        step: training step.
        version: weight version that the step trains.
        tokenizer: folder or Hub name of the tokenizer of the policy. None saves no `tokens`.
    """
    count = batch.num_rows if settings.rows == "all" else settings.rows
    indices = evenly_spaced(count, batch.num_rows)
    with_tokens = evenly_spaced(settings.token_rows, len(indices))
    lists: Future | LocalRef | Sequence[TokenLists] = ()
    if with_tokens and tokenizer is not None and {"input_ids", "response_mask"} <= set(batch.columns):
        names = ["input_ids", "response_mask", *(name for name in _TOKEN_VALUES.values() if name in batch)]
        tokens = batch.select(*names).rows([indices[i] for i in with_tokens])
        lists = tokens.reduce(make_token_lists, names, tokenizer=tokenizer)
    else:
        with_tokens = []
    selected = _select_columns(batch).rows(indices)
    return selected.reduce(
        encode_training_rows,
        selected.columns,
        indices=indices,
        step=step,
        version=version,
        with_tokens=with_tokens,
        token_lists=lists,
    )


class RolloutSaver(RunObserver):
    """Saves the generated text of a run in `rollouts/`: training rows and evaluations of its steps."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        last_step: int,
        send_rows: Callable[[Kind, int, Sequence[Row]], None],
    ) -> None:
        """Opens `folder`. Removes the rows of the steps after `last_step`, which a resumed run repeats.

        `send_rows` sends rows of a step to the trackers.
        """
        self._config, self._send_rows = config, send_rows
        self._log = RolloutLog(folder, config.report.rollouts, last_step)
        self._step = self._version = 0
        self._evaluation_rows: tuple[int, list[Row]] = (0, [])
        """Last step with an evaluation, and the rows of its evaluations."""
        self._training_rows: dict[int, Future | LocalRef] = {}
        """`EncodedRows` by step. They are written with the metrics of their step."""

    def step_begun(self, step: int, version: int, batch: Batch) -> None:
        self._step, self._version = step, version

    def evaluated(self, step: int, values: Mapping[str, float], rows: Sequence[Row], num_examples: int) -> None:
        """Writes the rows of an evaluation of a step, together with those of earlier evaluations of this step."""
        earlier = self._evaluation_rows[1] if self._evaluation_rows[0] == step else ()
        self._evaluation_rows = (step, [*earlier, *rows])
        if rows and self._log.is_enabled:
            self._write(encode_rows("evaluation", step, self._evaluation_rows[1]))

    def save_training(self, batch: Batch, policy: str | None) -> None:
        """Selects the rows of this step's batch, if the step is due. `policy` is the trained role. Does not block."""
        if settings := self._log.training_settings(self._step):
            tokenizer = _find_tokenizer(self._config, policy)
            self._training_rows[self._step] = collect_training_rows(
                batch, settings, self._step, version=self._version, tokenizer=tokenizer
            )

    def step_done(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the selected training rows of a step, if there are any. Waits for their conversion."""
        if step in self._training_rows:
            self._write(self._training_rows.pop(step).get())

    def _write(self, rows: EncodedRows) -> None:
        self._log.write_encoded(rows)
        self._send_rows(rows.kind, rows.step, rows.shown)


def _find_tokenizer(config: RunConfig, role: str | None) -> str | None:
    """Returns the folder or the Hub name of the tokenizer of a role. None if the role has no model."""
    settings = None if role is None else config.role_settings.get(role)
    return str(settings.model.tokenizer_path) if isinstance(settings, TrainedConfig) else None


def _select_columns(batch: Batch) -> Batch:
    # Columns that a dataset or a recipe has added may be scores.
    names = [name for name in batch.columns if name in _OPTIONAL_COLUMNS or name not in FIELDS]
    return batch.select(*_REQUIRED_COLUMNS, *names)


def encode_training_rows(
    table: TensorDict,
    indices: list[int],
    step: int,
    version: int,
    with_tokens: Sequence[int],
    token_lists: Sequence[TokenLists | None],
) -> EncodedRows:
    """Returns the rows of a step as JSON lines. `with_tokens` are the positions of the rows that get `token_lists`."""
    rows = make_rows(table, indices, version)
    for position, lists in zip(with_tokens, token_lists, strict=True):
        rows[position]["tokens"] = lists
    return encode_rows("training", step, rows)


def make_rows(table: TensorDict, indices: list[int], trained_version: int | None = None) -> list[Row]:
    """Returns one `Row` per row of the table.

    Args:
        table: columns of the rows.
        indices: positions of the rows in the full batch.
        trained_version: weight version that the step trains; None in an evaluation.
    """
    versions, advantages = _response_values(table, "weight_version"), _response_values(table, "advantages")
    oldest = [None if own is None or not len(own) else int(own.min()) for own in versions]
    columns: dict[str, list] = {
        "row": indices,
        "set": [None] * num_rows(table),  # an evaluation on several files replaces it
        "prompt_id": _values(table, "prompt_id"),
        "sample": _values(table, "sample"),
        "prompt": _prompts(table),
        "response": _values(table, "response"),
        "segments": _values(table, SEGMENTS),
        "answer": _values(table, "answer"),
        "finish_reason": [_FINISH_REASONS[truncated] for truncated in _values(table, "truncated")],
        "response_length": [None if mask is None else len(mask) for mask in _response_values(table, "response_mask")],
        "environment_length": _environment_lengths(table),
        "version": oldest,
        "newest_version": [None if own is None or not len(own) else int(own.max()) for own in versions],
        "staleness": [None if trained_version is None or own is None else trained_version - own for own in oldest],
        "score": [None if score is None or math.isnan(score) else score for score in _values(table, "scores")],
        "rewards": _rewards(table),
        "other_scores": _other_scores(table),
        "reward_failures": _reward_failures(table),
        "advantage": [None if own is None or not len(own) else float(own.double().mean()) for own in advantages],
        "tokens": [None] * num_rows(table),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


_FINISH_REASONS = {None: None, False: "stop", True: "length"}
"""Maps the column `truncated` to the finish reason."""


def _values(table: TensorDict, name: str) -> list:
    """Returns the values of a row column, or None for every row if the table lacks it."""
    return objects(table, name) if name in table["rows"].keys() else [None] * num_rows(table)  # noqa: SIM118 (a TensorDict)


def _prompts(table: TensorDict) -> list[str]:
    """Returns the prompt of each row. With an environment, this is what `reset` has returned."""
    episodes = _values(table, EPISODE)
    pairs = zip(_values(table, "prompt"), episodes, strict=True)
    return [prompt if episode is None else episode.get("prompt", prompt) for prompt, episode in pairs]


def _response_values(table: TensorDict, name: str) -> Sequence[torch.Tensor | None]:
    """Returns the values of a token column at the response tokens of each row, or None if the table lacks it."""
    tokens = table["tokens"]
    if name not in tokens.keys() or "response_mask" not in tokens.keys():  # noqa: SIM118 (a TensorDict)
        return [None] * num_rows(table)
    sizes = lengths(table).tolist()
    masks, columns = torch.split(tokens["response_mask"], sizes), torch.split(tokens[name], sizes)
    return [column[mask] for column, mask in zip(columns, masks, strict=True)]


def _environment_lengths(table: TensorDict) -> list[int] | list[None]:
    if "response_mask" not in table["tokens"].keys():  # noqa: SIM118 (a TensorDict)
        return [None] * num_rows(table)
    return environment_lengths(table["tokens", "response_mask"], lengths(table)).tolist()


def _rewards(table: TensorDict) -> list[dict[str, float | None] | None]:
    """Returns the score of each reward of each row, or None for every row if the table lacks `reward_calls`."""
    return [
        None if calls is None else {name: call["score"] for name, call in calls.items()}
        for calls in _values(table, CALLS)
    ]


def _reward_failures(table: TensorDict) -> list[dict[str, str] | None]:
    """Returns the causes of the failed calls of each row, or None for every row if the table lacks `reward_calls`."""
    return [
        None
        if calls is None
        else {name: call["message"] for name, call in calls.items() if call["failure"] is not None}
        for calls in _values(table, CALLS)
    ]


def _other_scores(table: TensorDict) -> list[dict[str, float]]:
    """Returns the values of the float columns of each row, except `scores` and those of the rewards."""
    rewards = {name for calls in _values(table, CALLS) for name in calls or ()}
    columns = {
        name: column.tolist()
        for name, column in table["rows"].items()
        if name not in {"scores", *rewards}
        and isinstance(column, torch.Tensor)
        and column.is_floating_point()
        and column.ndim == 1
    }
    return [{name: values[i] for name, values in columns.items()} for i in range(num_rows(table))]


# Values per token.


def make_token_lists(table: TensorDict, tokenizer: str) -> list[TokenLists | None]:
    """Returns the value of `tokens` of each row: lists over the tokens from the first to the last one of the policy.

    None for a row without tokens of the policy.
    """
    sizes, loaded = lengths(table).tolist(), _load_tokenizer(tokenizer)
    columns = {name: column.split(sizes) for name, column in table["tokens"].items()}
    return [_token_lists({name: parts[i] for name, parts in columns.items()}, loaded) for i in range(len(sizes))]


@lru_cache(maxsize=1)
def _load_tokenizer(path: str) -> ChatTokenizer:
    return ChatTokenizer(path)


def _token_lists(row: Mapping[str, torch.Tensor], tokenizer: ChatTokenizer) -> TokenLists | None:
    positions = row["response_mask"].nonzero()
    if not len(positions):
        return None
    response = slice(int(positions[0]), int(positions[-1]) + 1)
    mask, ids = row["response_mask"][response].tolist(), row["input_ids"][response].tolist()
    lists: TokenLists = {"text": split_text(ids, tokenizer.decode_all), "ids": ids, "mask": [int(own) for own in mask]}
    values = {name: row[column][response] for name, column in _TOKEN_VALUES.items() if column in row}
    if {"logprobs", "rollout_logprobs"} <= values.keys():
        values["ratios"] = (values["logprobs"].double() - values["rollout_logprobs"].double()).exp()
    for name, own in values.items():
        if own.is_floating_point():
            lists[name] = round_values(own.double().tolist(), mask)
        else:
            lists[name] = [value if present else None for value, present in zip(own.tolist(), mask, strict=True)]
    return lists


def split_text(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns the text of each token. The pieces, concatenated, are the text of all tokens.

    Byte-level tokenizers split a character into several tokens. The last one of them gets the character, and the others
    get an empty piece. Bytes that are no character become U+FFFD.

    Args:
        ids: token ids.
        decode: returns the text of token ids.
    """
    pieces: list[str] = []
    start = done = num_pending = 0  # `done`: number of characters of the tokens from `start` that `pieces` contain
    for i in range(len(ids)):
        text = decode(ids[start : i + 1])
        end = len(text) if i == len(ids) - 1 else len(text.rstrip(_REPLACEMENT))
        if num_pending == _MAX_PENDING:
            end = max(end, len(text) - 1)  # the last bytes may still be the beginning of a character
        pieces.append(text[done:end])
        num_pending = 0 if end > done else num_pending + 1
        done = max(done, end)
        if i + 1 - start >= 2 * _CONTEXT and not num_pending:
            num_missing = len(text) - done
            start = i + 1 - _CONTEXT
            done = len(decode(ids[start : i + 1])) - num_missing
    return pieces


def round_values(values: Iterable[float], is_present: Iterable[bool]) -> list[float | None]:
    """Returns the values, rounded to a few significant digits. A value that is absent or not finite becomes None."""
    return [
        float(f"{value:.{_NUM_DIGITS}g}") if present and math.isfinite(value) else None
        for value, present in zip(values, is_present, strict=True)
    ]
