"""Runs the `flowrl` command: `python -m flowrl.cli`."""

import sys

from flowrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
