"""How much memory a run takes on this machine."""

import psutil


def resident_mb() -> float:
    """Memory of this process and all it started, in MB; pages that several share are counted once."""
    driver = psutil.Process()
    total = 0
    for process in (driver, *driver.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 1e6
