"""Writes the files of a prepared folder."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Protocol, Self

import numpy as np

from flowrl.data.checksums import checksum_of
from flowrl.data.reading.raw_rows import MANIFEST, import_library
from flowrl.data.reading.row_problems import RowCounts

_PERCENTILES = (50, 95, 99)
FORMAT_VERSION = 4
"""Version of the folder's contents. Raise it if the same rows and tokenizer give other files, tokens, masks or hashes.
"""

VERSION_WITHOUT_TEXT_PREFIX = 2
"""Version in which plain text lacks the tokens before a text, such as BOS, and the manifest lacks `largest_id`. Rows of
kinds other than `text` are the same as in the current version.
"""


class Rows(Protocol):
    """Rows of one chunk. `prepare.PreparedChunk` implements this protocol."""

    batch: Any
    lines: list[str]
    counts: RowCounts
    lengths: np.ndarray
    num_trained: np.ndarray
    largest_ids: np.ndarray
    columns: list[tuple[str, ...]]
    num_bytes: int


class FolderWriter:
    """Writes arrow shards and JSON lines, and collects the statistics of the manifest."""

    def __init__(self, folder: Path, rows_per_shard: int) -> None:
        self._folder, self._rows_per_shard = folder, rows_per_shard
        self.counts = RowCounts()
        self.num_rows = 0
        self._shards: list[dict[str, Any]] = []
        self._shard_rows = 0
        self._arrow: Any = None
        """RecordBatchStreamWriter of the open shard, from pyarrow."""
        self._json: IO[str] | None = None
        self._columns: dict[str, int] = {}
        self._lengths = np.zeros(0, dtype=np.int64)
        self._trained = np.zeros(0, dtype=np.int64)
        self._largest_id = 0
        for name in ("arrow", "jsonl"):
            (folder / name).mkdir()

    def write(self, rows: Rows, is_kept: np.ndarray) -> None:
        """Appends the rows of a chunk for which `is_kept` is true. Adds all counts of the chunk."""
        self.counts.add(rows.counts)
        batch, lines = rows.batch, rows.lines
        if not is_kept.any():
            return
        if not is_kept.all():
            arrow = import_library("pyarrow", "a prepared folder")
            batch = batch.filter(arrow.array(is_kept))
            lines = [line for line, kept in zip(lines, is_kept, strict=True) if kept]
        start = 0
        while start < len(lines):
            if self._json is None:
                self._open_shard(batch.schema)
            assert self._json is not None
            count = min(len(lines) - start, self._rows_per_shard - self._shard_rows)
            self._arrow.write_batch(batch.slice(start, count))
            self._json.write("".join(f"{line}\n" for line in lines[start : start + count]))
            self._shard_rows += count
            start += count
            if self._shard_rows == self._rows_per_shard:
                self._close_shard()
        self.num_rows += len(lines)
        self._lengths = _add_histogram(self._lengths, rows.lengths[is_kept])
        self._trained = _add_histogram(self._trained, rows.num_trained[is_kept])
        self._largest_id = max(self._largest_id, int(rows.largest_ids[is_kept].max()))
        for names, kept in zip(rows.columns, is_kept, strict=True):
            for name in names if kept else ():
                self._columns[name] = self._columns.get(name, 0) + 1

    def finish(self, **values: Any) -> dict[str, Any]:
        """Writes the manifest, including `values`, and returns it."""
        self._close_shard()
        try:
            written_by = f"flowrl {version('flowrl')}"
        except PackageNotFoundError:
            written_by = "flowrl"
        counts = self.counts
        manifest = {
            "version": FORMAT_VERSION,
            "written_by": written_by,
            "num_rows": self.num_rows,
            "num_read": counts.num_read,
            "num_truncated": counts.num_truncated,
            "dropped": dict(sorted(counts.dropped.items())),
            "first_dropped": dict(sorted(counts.first.items())),
            "num_tokens": _total(self._lengths),
            "lengths": _statistics(self._lengths),
            "trained_tokens": _statistics(self._trained),
            "largest_id": self._largest_id,
            "columns": self._columns,
            "shards": self._shards,
            **values,
        }
        (self._folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        return manifest

    def _open_shard(self, schema: Any) -> None:
        ipc = import_library("pyarrow.ipc", "a prepared folder")
        name = f"part-{len(self._shards):05d}"
        self._shards.append({"file": f"arrow/{name}.arrow", "jsonl": f"jsonl/{name}.jsonl"})
        self._arrow = ipc.new_stream(str(self._folder / "arrow" / f"{name}.arrow"), schema)
        self._json = (self._folder / "jsonl" / f"{name}.jsonl").open("w", encoding="utf-8")
        self._shard_rows = 0

    def _close_shard(self) -> None:
        if self._arrow is None or self._json is None:
            return
        self._arrow.close()
        self._json.close()
        shard = self._shards[-1]
        checksum = checksum_of(self._folder / shard["file"])
        shard |= {"rows": self._shard_rows, "bytes": checksum.size, "crc32": checksum.crc32}
        self._arrow = self._json = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_shard()


def _add_histogram(histogram: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Adds the lengths `values` to `histogram`, the number of rows per length, and returns the sum."""
    added = np.bincount(values, minlength=len(histogram))
    added[: len(histogram)] += histogram
    return added


def _total(histogram: np.ndarray) -> int:
    return int((histogram * np.arange(len(histogram))).sum())


def _statistics(histogram: np.ndarray) -> dict[str, float]:
    count = int(histogram.sum())
    if not count:
        return {}
    below = np.cumsum(histogram)
    present = np.flatnonzero(histogram)
    return {
        "min": int(present[0]),
        "mean": round(_total(histogram) / count, 2),
        **{f"p{p}": int(np.searchsorted(below, count * p / 100)) for p in _PERCENTILES},
        "max": int(present[-1]),
    }
