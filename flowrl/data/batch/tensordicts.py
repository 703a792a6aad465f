"""Batches in workers: a TensorDict with `rows` `[B]` and flat `tokens` `[T]`. `rows["length"]` is the number of tokens
per row.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from flowrl.data.batch.payload import Payload


def make_tensordict(
    rows: Mapping[str, torch.Tensor | Sequence] | None = None,
    tokens: Mapping[str, torch.Tensor] | None = None,
    lengths: torch.Tensor | None = None,
    num_rows: int | None = None,
) -> TensorDict:
    """Returns a TensorDict with row and token columns.

    Args:
        rows: row columns, each a tensor `[B, ...]` or a sequence of B objects.
        tokens: flat token columns, each `[T, ...]`.
        lengths: int64 `[B]`, number of tokens per row. Required if there are token columns.
        num_rows: B. Required if there are neither row columns nor lengths.
    Raises:
        ValueError: row columns have different numbers of rows, or token columns do not match `lengths`.
    """
    rows, tokens = dict(rows or {}), dict(tokens or {})
    if lengths is not None:
        rows["length"] = lengths
    sizes = {name: len(column) for name, column in rows.items()}
    count = num_rows if num_rows is not None else next(iter(sizes.values()), 0)
    wrong = [f"{name} ({size})" for name, size in sizes.items() if size != count]
    if wrong:
        raise ValueError(f"row columns {', '.join(wrong)} do not have {count} rows like the others")
    if tokens and lengths is None:
        raise ValueError(f"token columns {', '.join(tokens)} need lengths [B]: the number of tokens of each row")
    num_tokens = 0 if lengths is None else int(lengths.sum())
    wrong = [f"{name} ({len(column)})" for name, column in tokens.items() if len(column) != num_tokens]
    if wrong:
        raise ValueError(f"token columns {', '.join(wrong)} do not have {num_tokens} tokens, the sum of the lengths")
    row_columns = TensorDict({}, batch_size=[count])
    for name, column in rows.items():
        row_columns[name] = column if isinstance(column, torch.Tensor) else _object_column(column)
    token_columns = TensorDict(dict(tokens), batch_size=[num_tokens])
    return TensorDict({"rows": row_columns, "tokens": token_columns}, batch_size=[])


def _object_column(values: Sequence) -> NonTensorStack | NonTensorData:
    # NonTensorStack rejects an empty list.
    return NonTensorStack(*values) if len(values) else NonTensorData(data=[], batch_size=[0])


def num_rows(batch: TensorDictBase) -> int:
    return batch["rows"].batch_size[0]


def lengths(batch: TensorDictBase) -> torch.Tensor:
    """Returns the number of tokens per row, int64 `[B]`. Requires at least one token column."""
    return batch["rows", "length"]


def objects(batch: TensorDictBase, name: str) -> list:
    """Returns a row column as a list of B Python values."""
    column = batch["rows"].get(name)
    if column is None:
        raise KeyError(f"row column {name!r} is missing; there are {', '.join(map(str, batch['rows'].keys()))}")
    return column.tolist()


def row_positions(lengths_B: torch.Tensor) -> torch.Tensor:
    """Returns the mask of tokens in padded rows, bool `[B, L]`. L is the length of the longest row."""
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(longest, device=lengths_B.device)[None] < lengths_B[:, None]


def pad_tokens(values_T: torch.Tensor, lengths_B: torch.Tensor, padding: float = 0) -> torch.Tensor:
    """Pads flat tokens `[T, ...]` on the right, to rows `[B, L, ...]`. L is the length of the longest row."""
    present_BL = row_positions(lengths_B)
    padded = values_T.new_full((*present_BL.shape, *values_T.shape[1:]), padding)
    padded[present_BL] = values_T
    return padded


def unpad_tokens(values_BL: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Converts padded rows `[B, L, ...]` to flat tokens `[T, ...]`."""
    return values_BL[row_positions(lengths_B)]


def sum_tokens(values_T: torch.Tensor, mask_T: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Returns the sum of each row's masked tokens `[B]`, such as the log-probability of its response.

    Args:
        values_T: token column `[T]`. Values outside the mask have no effect, even if they are NaN.
        mask_T: bool `[T]`, usually the column `response_mask`.
        lengths_B: number of tokens per row.
    """
    return pad_tokens(values_T.masked_fill(~mask_T, 0), lengths_B).sum(-1)


def to_tensordict(payload: Payload, *, copy: bool = False) -> TensorDict:
    """Converts a payload to a TensorDict. Without `copy`, the tensors share the payload's memory and must not be
    modified.
    """

    def tensor(name: str, column: np.ndarray) -> torch.Tensor:
        values = torch.from_numpy(column.copy() if copy else column)
        return values.view(torch.bfloat16) if name in payload.bfloat16 else values

    rows = {n: tensor(n, c) if isinstance(c, np.ndarray) else c for n, c in payload.rows.items()}
    tokens = {name: tensor(name, column) for name, column in payload.tokens.items()}
    lengths_B = None if payload.lengths is None else tensor("length", payload.lengths)
    return make_tensordict(rows, tokens, lengths_B, payload.num_rows)


def from_tensordict(batch: TensorDictBase, input_lengths: np.ndarray | None = None) -> Payload:
    """Converts a TensorDict to a payload in CPU memory.

    Args:
        batch: TensorDict with row and token columns.
        input_lengths: number of tokens per row of the method's input. Used if the TensorDict has no `length`.
    Raises:
        ValueError: token columns have no lengths, or the sum of the lengths is not the number of tokens.
    """
    rows: dict[str, np.ndarray | list] = {}
    tokens: dict[str, np.ndarray] = {}
    bfloat16: set[str] = set()
    lengths_B = input_lengths
    for name, column in batch["rows"].items() if "rows" in batch.keys() else ():  # noqa: SIM118 (a TensorDict)
        if name == "length":
            lengths_B = _array(column)
        elif isinstance(batch["rows"].get(name), torch.Tensor):
            rows[name] = _array(column)
            bfloat16.update({name} if column.dtype == torch.bfloat16 else ())
        else:
            rows[name] = batch["rows"].get(name).tolist()
    for name, column in batch["tokens"].items() if "tokens" in batch.keys() else ():  # noqa: SIM118 (a TensorDict)
        tokens[name] = _array(column)
        bfloat16.update({name} if column.dtype == torch.bfloat16 else ())
    count = num_rows(batch) if "rows" in batch.keys() else 0  # noqa: SIM118 (a TensorDict)
    if not rows and input_lengths is not None and lengths_B is input_lengths:
        count = len(input_lengths)
    if not tokens:
        return Payload(count, rows, {}, None, frozenset(bfloat16))
    if lengths_B is None:
        raise ValueError(f"token columns {', '.join(tokens)} need rows['length']: the number of tokens of each row")
    for name, column in tokens.items():
        if len(column) != int(lengths_B.sum()):
            raise ValueError(
                f"token column {name!r} has {len(column)} tokens where the lengths sum to {lengths_B.sum()}"
            )
    return Payload(count, rows, tokens, np.asarray(lengths_B, dtype=np.int64), frozenset(bfloat16))


def _array(column: torch.Tensor) -> np.ndarray:
    values = column.detach().cpu().contiguous()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def environment_lengths(mask_T: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Returns the number of tokens of an environment in each row, int64 [B].

    A token belongs to an environment if `response_mask` is false and it is between two tokens of the policy.

    Args:
        mask_T: column `response_mask`, bool [T].
        lengths_B: number of tokens of each row.
    """
    mask_BT = pad_tokens(mask_T, lengths_B)
    after_first_BT = mask_BT.cumsum(-1) > 0
    before_last_BT = mask_BT.flip(-1).cumsum(-1).flip(-1) > 0
    return (after_first_BT & before_last_BT & ~mask_BT).sum(-1)
