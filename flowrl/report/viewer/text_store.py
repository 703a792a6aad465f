"""Reads the saved rows of a run that may still be active, one shard at a time."""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

from flowrl.checkpoints.run_folder import RunFolder
from flowrl.report.rollout_log import Kind, RolloutLogError, Row, parse_line, read_rows, saved_steps, shard_path

_NUM_CACHED = 4
"""Number of shards whose rows are kept in memory."""


class Shard(NamedTuple):
    """Identifies one file of saved rows: the training or the evaluation rows of a step."""

    step: int
    kind: Kind


class TextStore:
    """Reads the shards of a run folder, and caches the rows of the most recently read shards."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self._folder = RunFolder(run_folder).rollouts
        self._cache: OrderedDict[Shard, tuple[int, list[Row]]] = OrderedDict()
        """Shard -> (`changed_ns` when the shard was read, rows)."""
        self._lock = threading.Lock()  # the viewer loads several shards at the same time

    def shards(self) -> list[Shard]:
        """Returns the shards in the order of their steps. The evaluation of a step follows its training rows."""
        kinds: tuple[Kind, ...] = get_args(Kind)
        return sorted(
            (Shard(step, kind) for kind in kinds for step in saved_steps(self._folder, kind)),
            key=lambda shard: (shard.step, kinds.index(shard.kind)),
        )

    def changed_ns(self, shard: Shard) -> int:
        """Returns the time at which a shard was written, in ns since the epoch. Returns 0 if it has been removed."""
        try:
            return shard_path(self._folder, shard.kind, shard.step).stat().st_mtime_ns
        except OSError:
            return 0

    def load(self, shard: Shard) -> list[Row]:
        """Returns the rows of a shard. Raises RolloutLogError if it has been removed or is corrupt."""
        changed_ns = self.changed_ns(shard)
        with self._lock:
            cached = self._cache.get(shard)
        if cached is None or cached[0] != changed_ns:
            cached = changed_ns, read_rows(self._folder, shard.kind, shard.step)
        with self._lock:
            self._cache[shard] = cached
            self._cache.move_to_end(shard)
            while len(self._cache) > _NUM_CACHED:
                self._cache.popitem(last=False)
        return cached[1]

    def rows_of_prompt(self, row: Row) -> Iterator[Row]:
        """Yields all rows that have the same prompt as `row`, in ascending order of their steps.

        Yields only rows of the same kind, because training and evaluation number their prompts separately. For speed,
        parses only the lines that contain the id of the prompt.
        """
        if row["prompt_id"] is None:
            return
        pattern = re.compile(rb'"prompt_id": ?%d[,}]' % row["prompt_id"])
        for shard in self.shards():
            if shard.kind != row["kind"]:
                continue
            path = shard_path(self._folder, shard.kind, shard.step)
            try:
                lines = path.read_bytes().split(b"\n")
            except OSError:
                continue  # `max_mb` removes the oldest shards while the run is active
            for number, line in enumerate(lines, start=1):
                if not pattern.search(line):
                    continue
                try:
                    parsed = parse_line(path, number, line.decode("utf-8", "replace"))
                except RolloutLogError:
                    continue
                if (parsed["prompt_id"], parsed["set"]) == (row["prompt_id"], row["set"]):
                    yield parsed
