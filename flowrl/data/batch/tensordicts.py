"""The worker's view of rows: a TensorDict of two tables, `rows` `[B]` and `tokens` `[T]`, linked by `rows["length"]`.

Token columns are flat: row i's tokens are the next `length[i]` values. Padding exists only inside an engine or a pure
function, between `pad_tokens` and `unpad_tokens`. Column names: docs/batch.md.
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
    """Builds a table.

    Args:
        rows: row columns, each a tensor `[B, ...]` or a sequence of B objects.
        tokens: token columns, each `[T, ...]`.
        lengths: int64 `[B]`, tokens per row; needed with tokens.
        num_rows: B, needed only when nothing else tells it.
    Raises:
        ValueError: the columns do not describe the same rows or tokens.
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
    row_table = TensorDict({}, batch_size=[count])
    for name, column in rows.items():
        row_table[name] = column if isinstance(column, torch.Tensor) else _object_column(column)
    token_table = TensorDict(dict(tokens), batch_size=[num_tokens])
    return TensorDict({"rows": row_table, "tokens": token_table}, batch_size=[])


def _object_column(values: Sequence) -> NonTensorStack | NonTensorData:
    # A stack of nothing cannot be made; a list of nothing stays a list.
    return NonTensorStack(*values) if len(values) else NonTensorData(data=[], batch_size=[0])


def num_rows(table: TensorDictBase) -> int:
    """B, the number of rows."""
    return table["rows"].batch_size[0]


def lengths(table: TensorDictBase) -> torch.Tensor:
    """Tokens per row, int64 `[B]`; there when any token column is."""
    return table["rows", "length"]


def objects(table: TensorDictBase, name: str) -> list:
    """An object column (strings, lists, ...) as a list of B values; a tensor column as its values."""
    column = table["rows"].get(name)
    if column is None:
        raise KeyError(f"row column {name!r} is not in the table; it has {', '.join(map(str, table['rows'].keys()))}")
    return column.tolist()


def row_positions(lengths_B: torch.Tensor) -> torch.Tensor:
    """Bool `[B, L]`, L the longest row: true where a row has a token."""
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(longest, device=lengths_B.device)[None] < lengths_B[:, None]


def pad_tokens(values_T: torch.Tensor, lengths_B: torch.Tensor, padding: float = 0) -> torch.Tensor:
    """Flat `[T, ...]` to right-padded `[B, L, ...]`."""
    present_BL = row_positions(lengths_B)
    padded = values_T.new_full((*present_BL.shape, *values_T.shape[1:]), padding)
    padded[present_BL] = values_T
    return padded


def unpad_tokens(values_BL: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Right-padded `[B, L, ...]` back to flat `[T, ...]`."""
    return values_BL[row_positions(lengths_B)]


def take_rows(table: TensorDictBase, index_N: torch.Tensor) -> TensorDict:
    """The rows at int64 `index_N`, in that order, with their tokens."""
    selected = {name: table["rows"].get(name)[index_N] for name in table["rows"].keys()}  # noqa: SIM118 (a TensorDict)
    rows = TensorDict(selected, batch_size=[len(index_N)])
    if not len(table["tokens"].keys()):
        return TensorDict({"rows": rows, "tokens": TensorDict({}, batch_size=[0])}, batch_size=[])
    lengths_B = lengths(table)
    starts = (torch.cumsum(lengths_B, 0) - lengths_B)[index_N]
    taken = lengths_B[index_N]
    before = torch.cumsum(taken, 0) - taken
    positions = torch.repeat_interleave(starts - before, taken) + torch.arange(int(taken.sum()))
    return TensorDict({"rows": rows, "tokens": table["tokens"][positions]}, batch_size=[])


def to_table(payload: Payload, *, copy: bool = False) -> TensorDict:
    """A payload as a table. The tensors share the payload's memory unless `copy`: do not write to them."""

    def tensor(name: str, column: np.ndarray) -> torch.Tensor:
        values = torch.from_numpy(column.copy() if copy else column)
        return values.view(torch.bfloat16) if name in payload.bfloat16 else values

    rows = {n: tensor(n, c) if isinstance(c, np.ndarray) else c for n, c in payload.rows.items()}
    tokens = {name: tensor(name, column) for name, column in payload.tokens.items()}
    lengths_B = None if payload.lengths is None else tensor("length", payload.lengths)
    return make_tensordict(rows, tokens, lengths_B, payload.num_rows)


def from_table(table: TensorDictBase, input_lengths: np.ndarray | None = None) -> Payload:
    """A table as a payload, on the CPU.

    Token columns take their lengths from the table's own `length`, or from `input_lengths` when the table states none
    (a method whose result is aligned with its input need not repeat them).

    Raises:
        ValueError: token columns without lengths, or whose lengths do not sum to the number of tokens.
    """
    rows: dict[str, np.ndarray | list] = {}
    tokens: dict[str, np.ndarray] = {}
    bfloat16: set[str] = set()
    lengths_B = input_lengths
    for name, column in table["rows"].items() if "rows" in table.keys() else ():  # noqa: SIM118 (a TensorDict)
        if name == "length":
            lengths_B = _array(column)
        elif isinstance(table["rows"].get(name), torch.Tensor):
            rows[name] = _array(column)
            bfloat16.update({name} if column.dtype == torch.bfloat16 else ())
        else:
            rows[name] = table["rows"].get(name).tolist()
    for name, column in table["tokens"].items() if "tokens" in table.keys() else ():  # noqa: SIM118 (a TensorDict)
        tokens[name] = _array(column)
        bfloat16.update({name} if column.dtype == torch.bfloat16 else ())
    count = num_rows(table) if "rows" in table.keys() else 0  # noqa: SIM118 (a TensorDict)
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
