"""The seeded faults: small patches that turn correct code into code with an error that a user could suffer from."""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "faults"
KINDS = frozenset(
    {
        "sign",
        "mask",
        "off_by_one",
        "dropped_field",
        "swapped_arguments",
        "lost_state",
        "axis",
        "detach",
        "default",
        "sync",
        "swallowed_error",
    }
)


@dataclass(frozen=True)
class Fault:
    """One patch, and the tests that could find it."""

    id: str
    package: str
    """Name of the file in `faults`."""

    fault: str
    """The consequence for a user, in one sentence."""

    kind: str
    file: str
    old: str
    """Text that occurs once in the file."""

    new: str
    tests: tuple[str, ...]
    """Paths or node ids, fast and closest to the code."""

    wider: tuple[str, ...] = ()
    """Paths or node ids that run only if `tests` find nothing."""

    @property
    def checksum(self) -> str:
        """Returns the checksum of all fields, by which a record refers to this version of the fault."""
        return f"{zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode()):08x}"

    def patch(self, source: str) -> str:
        """Returns the source of the file with the fault. Raises ValueError unless the old text occurs once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"fault {self.id}: its old text occurs {count} times in {self.file}: correct the list")
        return source.replace(self.old, self.new)


def read_faults(folder: Path = FOLDER) -> list[Fault]:
    """Returns the faults of all files of the folder. Raises ValueError for an id that occurs twice."""
    faults: dict[str, Fault] = {}
    for path in sorted(folder.glob("*.yaml")):
        entries: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, entry in entries.items():
            if name in faults:
                raise ValueError(f"{path}: fault {name} already exists: choose another id")
            lists = {key: tuple(entry.get(key, ())) for key in ("tests", "wider")}
            faults[name] = Fault(name, path.stem, **{**entry, **lists})
    return list(faults.values())
