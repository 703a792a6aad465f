"""Time to write and to open the report of a run with 10,000 steps and 20,000 saved rows, or of a shorter run.

The file is opened in headless Chromium, each time without a cache, until all sections are complete.

python -m tests.benchmarks.report_page [--steps N] [--repeats N]
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from flowrl.report.page.write_report import write_report
from tests.benchmarks.measure import read_arguments
from tests.report.page.chromium import missing_browser, open_browser, open_page
from tests.report.page.generated_run import write_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

MARKS = "['shown', 'ready'].map((name) => performance.getEntriesByName(name)[0].startTime)"
"""Milliseconds from the start until summary and curves are shown, and until all sections are ready."""


def read_cpu_s(page: "Page") -> float:
    """Returns the CPU time of the process that has the page, over all of its threads."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "ProcessTime")


def main() -> None:
    """Prints the size of the report, and the times in seconds, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="two rows are saved per step, on average")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = read_arguments(parser, steps=100, repeats=1)
    reason = missing_browser()
    if reason is not None and arguments.smoke:
        sys.stdout.write(f"skipped: {reason}\n")
        return
    if reason is not None:
        raise SystemExit(reason)
    with TemporaryDirectory() as name:
        run = write_run(Path(name) / "run", num_steps=arguments.steps, num_rows=50, every=25, num_token_rows=4)
        start_s = time.perf_counter()
        path = write_report([run])
        written_s = time.perf_counter() - start_s
        shown, ready, used = [], [], []
        with open_browser() as browser:
            for _ in range(arguments.repeats):
                with open_page(browser, path) as page:
                    for times, mark_ms in zip((shown, ready), page.evaluate(MARKS), strict=True):
                        times.append(mark_ms / 1e3)
                    used.append(read_cpu_s(page))
        result = {
            "megabytes": round(path.stat().st_size / 1e6, 2),
            "write_s": round(written_s, 2),
            "shown_s": round(statistics.median(shown), 2),
            "ready_s": round(statistics.median(ready), 2),
            "ready_cpu_s": round(statistics.median(used), 2),
            "load": os.getloadavg()[0],
        }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
