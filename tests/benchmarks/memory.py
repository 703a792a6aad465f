"""Compares estimated with measured peak memory for a grid of roles and settings, each in new processes.

python -m tests.benchmarks.memory [--with-allocator-cache] [NAME ...]

Exits with 1 if an estimate differs from its measured peak by more than 20 %.
"""

import argparse
import sys

from tests.benchmarks.measure import read_arguments
from tests.memory.memory_points import POINTS, estimated_peak, measure_growth


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares estimated with measured peak memory.")
    parser.add_argument("names", nargs="*", default=list(POINTS), metavar="NAME", help=", ".join(POINTS))
    parser.add_argument(
        "--with-allocator-cache", action="store_true", help="also measure with glibc's default caching of freed memory"
    )
    arguments = read_arguments(parser, names=[next(iter(POINTS))])
    sys.stdout.write("| role | estimate, MB | peak, MB | ratio | peak with glibc cache, MB |\n|---|---|---|---|---|\n")
    num_misses = 0
    for name in arguments.names:
        estimate, peak = estimated_peak(POINTS[name]) / 1e6, measure_growth(name) / 1e6
        cached = f"{measure_growth(name, free_at_once=False) / 1e6:.0f}" if arguments.with_allocator_cache else ""
        sys.stdout.write(f"| {name} | {estimate:.0f} | {peak:.0f} | {estimate / peak:.2f} | {cached} |\n")
        sys.stdout.flush()
        num_misses += not 0.8 <= estimate / peak <= 1.2
    return int(num_misses > 0)


if __name__ == "__main__":
    sys.exit(main())
