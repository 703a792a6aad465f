"""ProfiledStep: selects the calls of a step that are profiled, and names the files of the profiles."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class ProfiledStep:
    """Selects the calls of a step that are profiled, and names the files of the profiles."""

    folder: Path
    """Absolute path of the folder. It must be the same folder for all processes."""
    ranks: Collection[int]
    """Ranks that are profiled, in each role."""
    excluded_role: str | None = None
    """Role without profiles, because it generates continuously and its calls belong to no step."""
    _num_calls: Counter[str] = field(default_factory=Counter)

    def path(self, role: str, rank: int, method: str) -> Path | None:
        """Returns the file for the profile of the next call, or None if the call is not profiled."""
        if rank not in self.ranks or role == self.excluded_role:
            return None
        worker = f"{role}-{rank}"
        self._num_calls[worker] += 1
        return self.folder / worker / f"{self._num_calls[worker]:03d}-{method}.json.gz"
