"""Measures the memory of a running program on this machine."""

import psutil


def resident_mb() -> float:
    """Returns the memory of this process and its descendants in MB. Shared pages count once (PSS)."""
    driver = psutil.Process()
    total = 0
    for process in (driver, *driver.children(recursive=True)):
        try:
            # Only Linux reports PSS, the proportional share of pages that several processes map.
            info = process.memory_full_info()._asdict()
            total += info.get("pss", info["rss"])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 1e6
