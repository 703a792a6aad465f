"""Selects rows of a batch and converts them to the rows of flowrl/report/rollout_log.py, on the task worker."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from flowrl.controller.dispatch import Future
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.fields import FIELDS
from flowrl.data.batch.tensordicts import environment_lengths, lengths, num_rows, objects
from flowrl.report.rollout_log import Row, evenly_spaced
from flowrl.rewards.row_scores import CALLS
from flowrl.workers.dialogs import EPISODE

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
    "shaped_scores",
    "advantages",
)


def collect_rows(batch: Batch, limit: int | None = None) -> Future | LocalRef:
    """Returns a future of at most `limit` rows of a batch (None: all rows), as a list of `Row`. Does not block.

    Only the selected rows are sent to the task worker. Raises ColumnError if the batch lacks `prompt` or `response`.
    """
    indices = list(range(batch.num_rows)) if limit is None else evenly_spaced(limit, batch.num_rows)
    # Columns that a dataset or a recipe has added may be scores.
    names = [name for name in batch.columns if name in _OPTIONAL_COLUMNS or name not in FIELDS]
    selected = batch.select(*_REQUIRED_COLUMNS, *names).rows(indices)
    return selected.reduce(make_rows, selected.columns, indices=indices)


def make_rows(table: TensorDict, indices: list[int]) -> list[Row]:
    """Returns one `Row` per row of the table. `indices` are the positions of the rows in the full batch."""
    versions, advantages = _response_values(table, "weight_version"), _response_values(table, "advantages")
    columns: dict[str, list] = {
        "row": indices,
        "set": [None] * num_rows(table),  # an evaluation on several files replaces it
        "prompt_id": _values(table, "prompt_id"),
        "sample": _values(table, "sample"),
        "prompt": _prompts(table),
        "response": _values(table, "response"),
        "answer": _values(table, "answer"),
        "finish_reason": [_FINISH_REASONS[truncated] for truncated in _values(table, "truncated")],
        "response_length": [None if mask is None else len(mask) for mask in _response_values(table, "response_mask")],
        "environment_length": _environment_lengths(table),
        "version": [None if own is None or not len(own) else int(own.min()) for own in versions],
        "newest_version": [None if own is None or not len(own) else int(own.max()) for own in versions],
        "score": _values(table, "scores"),
        "other_scores": _other_scores(table),
        "reward_failures": _reward_failures(table),
        "advantage": [None if own is None or not len(own) else float(own.double().mean()) for own in advantages],
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


def _reward_failures(table: TensorDict) -> list[dict[str, str] | None]:
    """Returns the causes of the failed calls of each row, or None for every row if the table lacks `reward_calls`."""
    return [
        None
        if calls is None
        else {name: call["message"] for name, call in calls.items() if call["failure"] is not None}
        for calls in _values(table, CALLS)
    ]


def _other_scores(table: TensorDict) -> list[dict[str, float]]:
    columns = {
        name: column.tolist()
        for name, column in table["rows"].items()
        if name != "scores" and isinstance(column, torch.Tensor) and column.is_floating_point() and column.ndim == 1
    }
    return [{name: values[i] for name, values in columns.items()} for i in range(num_rows(table))]
