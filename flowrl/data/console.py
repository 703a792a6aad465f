"""Output console of the programs."""

import os
import sys

from rich.console import Console

_FILE_COLUMNS = 10_000


def make_console() -> Console:
    """Returns a console of standard output. It wraps lines on a terminal, but not in a file, where they are searched.

    The environment variable COLUMNS sets the width of both.
    """
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console()
    return Console(width=_FILE_COLUMNS)
