"""How much memory a run takes on this machine."""

import psutil


def resident_mb() -> float:
    """Memory of this process and all it started, in MB; pages that several share are counted once."""
    driver = psutil.Process()
    total = 0
    for process in (driver, *driver.children(recursive=True)):
        try:
            # Linux alone tells how much of a shared page is one process's.
            info = process.memory_full_info()._asdict()
            total += info.get("pss", info["rss"])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 1e6
