"""The folder of a prepared dataset: arrow shards that are mapped into memory, a JSON-lines copy, and a manifest."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.config.source import read_json
from flowrl.data.chat import ChatTokenizer, MissingEmbeddingError
from flowrl.data.messages import Conversation, DataError, Message
from flowrl.data.preparation.folder_writer import FORMAT_VERSION, VERSION_WITHOUT_TEXT_PREFIX
from flowrl.data.preparation.tokenized_rows import TokenizedRow, Tokens
from flowrl.data.reading.kinds import Kind
from flowrl.data.reading.raw_rows import MANIFEST, import_library, open_arrow
from flowrl.data.reading.shapes import parse_row
from flowrl.data.template import template_values

SIDES: Mapping[str, tuple[str, ...]] = {
    "prompts": ("input",),
    "sft": ("input",),
    "text": ("input",),
    "kto": ("input",),
    "preference": ("chosen", "rejected"),
}
"""Kind -> prefixes of its token columns, such as `input` for `input_ids` and `input_mask`."""


def row_values(row: Conversation, kind: Kind) -> dict[str, Any]:
    """Returns a row as a JSON object that `shapes.parse_row` converts to the same conversation."""

    def turns(messages: Sequence[Message]) -> list[dict[str, str]]:
        return [{"role": message.role, "content": message.content} for message in messages]

    if row.text is not None:
        values: dict[str, Any] = {"source": row.text[0], "Target": row.text[1]}
    elif kind == "preference":
        values = {"context": turns(row.messages), "chosen": turns(row.chosen), "rejected": turns(row.rejected)}
    elif kind == "kto":
        values = {"prompt": turns(row.messages), "completion": turns(row.chosen), "label": row.label}
    else:
        values = {"messages": turns(row.messages)}
    return values | {name: value for name, value in row.columns.items() if name not in values}


def encode_batch(rows: Sequence[TokenizedRow], kind: Kind) -> tuple[Any, list[str]]:  # Any: pyarrow.RecordBatch
    """Returns rows as an arrow record batch, and their JSON lines."""
    arrow = import_library("pyarrow", "a prepared folder")
    lines = [json.dumps(row_values(row.conversation, kind), ensure_ascii=False) for row in rows]
    columns = {
        "row": arrow.array(lines, arrow.string()),
        "file": arrow.array([str(row.conversation.file) for row in rows], arrow.string()).dictionary_encode(),
        "line": arrow.array([row.conversation.line for row in rows], arrow.int64()),
        "length": arrow.array([row.length for row in rows], arrow.int32()),
    }
    for index, name in enumerate(SIDES[kind]):
        sides = [row.sides[index] for row in rows]
        offsets = arrow.array([0, *accumulate(len(side.ids) for side in sides)], arrow.int32())
        ids, masks = np.concatenate([s.ids for s in sides]), np.concatenate([s.mask for s in sides])
        columns[f"{name}_ids"] = arrow.ListArray.from_arrays(offsets, arrow.array(ids, arrow.int32()))
        if kind != "prompts":
            columns[f"{name}_mask"] = arrow.ListArray.from_arrays(offsets, arrow.array(masks, arrow.bool_()))
    return arrow.RecordBatch.from_pydict(columns), lines


def tokenizer_hash(tokenizer: ChatTokenizer, *, has_text_prefix: bool = True) -> str:
    """Returns a hash of everything that determines the tokens of a text: vocabulary, rules, end token, and, with
    `has_text_prefix`, the tokens before plain text.

    Excludes the settings of truncation and padding, because they do not affect token ids, and calls of the tokenizer
    change them.
    """
    known: Any = tokenizer.tokenizer  # Any: transformers types its attributes too loosely
    if known.is_fast:
        rules = json.loads(known.backend_tokenizer.to_str())
        for name in ("truncation", "padding", "post_processor"):
            rules.pop(name, None)
    else:
        rules = {"vocabulary": known.get_vocab()}
    tokens = [str(known.bos_token), str(known.eos_token), *(tokenizer.text_prefix if has_text_prefix else ())]
    return _hash(json.dumps([type(known).__name__ if not known.is_fast else "", rules, tokens], sort_keys=True))


def template_hash(tokenizer: ChatTokenizer) -> str:
    """Returns a hash of the conversation template. Excludes the stop tokens, which do not change a row."""
    values = {name: value for name, value in template_values(tokenizer.template).items() if "stop" not in name}
    return _hash(json.dumps(values, sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_prepared(path: Path) -> bool:
    """Returns whether a path is the folder of a prepared dataset."""
    return (path / MANIFEST).is_file() and (path / "arrow").is_dir()


class PreparedFolder(Sequence[TokenizedRow]):
    """The rows of a prepared dataset. The files are memory-mapped, and a row is read on access."""

    def __init__(self, path: Path) -> None:
        """Opens the folder. Raises DataError if the folder is incomplete or corrupt, or has another format version."""
        self.path = path
        try:
            self.manifest: Mapping[str, Any] = read_json(path / MANIFEST)
            self._version = self.manifest["version"]
            self.kind: Kind = self.manifest["kind"]
            is_same = self._version == VERSION_WITHOUT_TEXT_PREFIX and self.kind != "text"
            if self._version != FORMAT_VERSION and not is_same:
                raise DataError(
                    f"the prepared folder {path} was written by another version of flowrl: prepare it again"
                )
            for shard in self.manifest["shards"]:
                if Path(shard["file"]).parts[:-1] != ("arrow",):
                    raise ValueError(f"{shard['file']} is not a file in arrow/")
                if (size := (path / shard["file"]).stat().st_size) != shard["bytes"]:
                    raise ValueError(f"{shard['file']} has {size} bytes instead of {shard['bytes']}")
            self._batches = [batch for shard in self.manifest["shards"] for batch in open_arrow(path / shard["file"])]
        except DataError:
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"the prepared folder {path} is corrupt ({error}): prepare it again") from error
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        if len(self) != self.manifest["num_rows"]:
            raise DataError(
                f"the prepared folder {path} has {len(self)} rows, but its manifest has {self.manifest['num_rows']}: "
                f"prepare it again"
            )

    def check_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Raises DataError if the rows were tokenized with another tokenizer or template."""
        own = tokenizer_hash(tokenizer, has_text_prefix=self._version != VERSION_WITHOUT_TEXT_PREFIX)
        for name, now in (("tokenizer", own), ("template", template_hash(tokenizer))):
            if self.manifest[f"{name}_hash"] != now:
                raise DataError(
                    f"the prepared folder {self.path} was made with a different {name} from that of {tokenizer.path} "
                    f"(hash {self.manifest[f'{name}_hash']} instead of {now}): prepare the data again with this "
                    f"{name}, or use the model that it was prepared for"
                )

    def check_ids(self, tokenizer: ChatTokenizer) -> None:
        """Raises DataError with the location of a row that has a token for which the model has no embedding."""
        try:
            tokenizer.check_ids([self._largest_id])
        except MissingEmbeddingError as error:
            row = next(row for row in self if any(self._largest_id in side.ids for side in row.sides))
            raise DataError(f"{row.conversation.location}: {error}") from error

    @cached_property
    def _largest_id(self) -> int:
        """Largest token id of all rows."""
        if self._version != VERSION_WITHOUT_TEXT_PREFIX:
            return self.manifest["largest_id"]
        columns = [batch.column(f"{name}_ids") for batch in self._batches for name in SIDES[self.kind]]
        return max((int(column.flatten().to_numpy().max(initial=0)) for column in columns), default=0)

    def check_columns(self, needs: Sequence[str]) -> None:
        """Raises DataError if a row lacks one of these columns."""
        counts = self.manifest["columns"]
        for name in needs:
            if counts.get(name, 0) != len(self):
                raise DataError(
                    f"the prepared folder {self.path} has {name!r} in {counts.get(name, 0)} of {len(self)} rows, but "
                    f"the reward or environment function has a parameter {name} without a default: add the column and "
                    f"prepare again, rename the parameter to one of {', '.join(counts) or 'no column'}, or give it a "
                    f"default"
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the rows."""
        return tuple(self.manifest["columns"])

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [rows], number of tokens of the longest side of each row."""
        lengths = [batch.column("length").to_numpy() for batch in self._batches]
        return np.concatenate(lengths).astype(np.int64) if lengths else np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: Any) -> Any:  # Any: a row for an int, a list for a slice, as `Sequence` declares
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        batch_index = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[batch_index]
        offset = index - (int(self._ends[batch_index - 1]) if batch_index else 0)
        file, line = Path(batch.column("file")[offset].as_py()), batch.column("line")[offset].as_py()
        row = parse_row(json.loads(batch.column("row")[offset].as_py()), {}, file, line, is_prepared=True)
        return TokenizedRow(row, tuple(self._side(batch, name, offset) for name in SIDES[self.kind]))

    def _side(self, batch: Any, name: str, offset: int) -> Tokens:  # Any: pyarrow.RecordBatch
        ids = batch.column(f"{name}_ids")[offset].values.to_numpy()
        if self.kind == "prompts":
            return Tokens(ids, np.zeros(len(ids), dtype=bool))
        return Tokens(ids, batch.column(f"{name}_mask")[offset].values.to_numpy(zero_copy_only=False))

    def __iter__(self) -> Iterator[TokenizedRow]:
        return (self[index] for index in range(len(self)))
