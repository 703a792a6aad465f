"""Which processes have ended, of those that will be replaced: their calls say so only when others have taken over.

Only those on the driver's machine are looked at. Of one on another node the driver hears when its replacement has
answered a call.
"""

from collections.abc import Collection

import psutil

from flowrl.controller.failures.stacks import armed


class Liveness:
    """The processes of this machine that were alive at the last look."""

    def __init__(self) -> None:
        self._alive: dict[str, psutil.Process] = {}

    def ended(self, names: Collection[str]) -> list[str]:
        """Those armed processes, by their names, that have ended since the last look. Each is told once."""
        lost = [name for name in self._alive if name in names and not _runs(self._alive[name])]
        for name in lost:
            del self._alive[name]
        # Looking for a process goes through all of the machine's, so it is done for those that are not known alone.
        for name, (process_id, _) in armed([name for name in names if name not in self._alive]).items():
            try:
                self._alive[name] = psutil.Process(process_id)
            except psutil.NoSuchProcess:
                continue
        return lost


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
