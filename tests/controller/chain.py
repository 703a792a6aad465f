"""Workers that are compared with the oracle. Importable by Ray's processes."""

import torch
from tensordict import TensorDict

from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict, num_rows, objects, row_positions

PROTO = Dispatch.DP_COMPUTE_PROTO


class Chain(Worker):
    """The methods of tests/controller/oracle.py on tables."""

    @register(PROTO, blocking=False, reads=("x", "ids"), writes=("weight",))
    def weigh(self, table: TensorDict) -> TensorDict:
        rows_T = torch.repeat_interleave(torch.arange(num_rows(table)), lengths(table))
        sums = torch.zeros(num_rows(table), dtype=torch.int64).index_add(0, rows_T, table["tokens", "ids"])
        return make_tensordict({"weight": table["rows", "x"] * 3 + sums})

    @register(PROTO, blocking=False, reads=("ids",), writes=("next",), balance="tokens")
    def shift(self, table: TensorDict) -> TensorDict:
        return make_tensordict(tokens={"next": table["tokens", "ids"] + 1}, lengths=lengths(table))

    @register(PROTO, blocking=False, reads=("name", "x"), writes=("word",))
    def spell(self, table: TensorDict) -> TensorDict:
        marks = ["!" * (int(x) % 3) for x in table["rows", "x"]]
        words = [name + mark for name, mark in zip(objects(table, "name"), marks, strict=True)]
        return make_tensordict({"word": words}, num_rows=len(words))

    @register(PROTO, blocking=False, reads=("x", "ids", "name"), writes=("x", "ids", "name"), rows=2)
    def twice(self, table: TensorDict) -> TensorDict:
        return _rows([row | {"ids": [*row["ids"], k]} for row in _as_rows(table) for k in (0, 1)])

    @register(PROTO, blocking=False, reads=("x", "ids", "name"), writes=("x", "ids", "name"), rows="unknown")
    def odd(self, table: TensorDict) -> TensorDict:
        return _rows([row for row in _as_rows(table) if row["x"] % 2])


def _as_rows(table: TensorDict) -> list[dict]:
    tokens = [ids.tolist() for ids in table["tokens", "ids"].split(lengths(table).tolist())] if num_rows(table) else []
    return [
        {"x": int(x), "ids": ids, "name": name}
        for x, ids, name in zip(table["rows", "x"], tokens, objects(table, "name"), strict=True)
    ]


def _rows(rows: list[dict]) -> TensorDict:
    lengths_B = torch.tensor([len(row["ids"]) for row in rows], dtype=torch.int64)
    ids = torch.tensor([token for row in rows for token in row["ids"]], dtype=torch.int64)
    assert row_positions(lengths_B).sum() == len(ids)
    columns = {"x": torch.tensor([row["x"] for row in rows], dtype=torch.int64), "name": [row["name"] for row in rows]}
    return make_tensordict(columns, {"ids": ids}, lengths_B)
