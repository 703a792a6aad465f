"""The calls of a step of which profiles are recorded."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class ProfiledStep:
    """Names the files of the profiles of a step."""

    folder: Path
    """Absolute path of the folder. It must be the same folder for all processes."""
    ranks: Collection[int]
    """Ranks of each role whose calls are profiled."""
    excluded_role: str | None = None
    """Role whose calls are not those of a step, because it generates continuously."""
    _num_calls: Counter[str] = field(default_factory=Counter)

    def path(self, role: str, rank: int, method: str) -> Path | None:
        """Returns the file of the next profile, or None for a call that is not profiled."""
        if rank not in self.ranks or role == self.excluded_role:
            return None
        worker = f"{role}-{rank}"
        self._num_calls[worker] += 1
        return self.folder / worker / f"{self._num_calls[worker]:03d}-{method}.json.gz"
