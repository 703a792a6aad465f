"""How far estimates of memory are from measured peaks, for a grid of roles and settings, in fresh processes.

python -m tests.benchmarks.memory [--as-it-is] [NAME ...]

The bound on the ratio is a fifth either way. `--as-it-is` measures with glibc's own way of keeping freed memory, too.
"""

import argparse
import sys

from tests.memory.memory_points import POINTS, grown, needed


def main() -> int:
    parser = argparse.ArgumentParser(description="Estimated memory beside measured peaks.")
    parser.add_argument("names", nargs="*", default=list(POINTS), metavar="NAME", help=", ".join(POINTS))
    parser.add_argument("--as-it-is", action="store_true", help="measure what glibc adds, too")
    arguments = parser.parse_args()
    sys.stdout.write("| what | estimate, MB | peak, MB | ratio | as it is, MB |\n|---|---|---|---|---|\n")
    missed = 0
    for name in arguments.names:
        estimate, peak = needed(POINTS[name]) / 1e6, grown(name) / 1e6
        as_it_is = f"{grown(name, freed_at_once=False) / 1e6:.0f}" if arguments.as_it_is else ""
        sys.stdout.write(f"| {name} | {estimate:.0f} | {peak:.0f} | {estimate / peak:.2f} | {as_it_is} |\n")
        sys.stdout.flush()
        missed += not 0.8 <= estimate / peak <= 1.2
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
