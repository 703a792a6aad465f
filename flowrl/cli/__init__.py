"""The `flowrl` command and the exit codes of every program.

Entry points: `main` (the command), `run_recipe` (main function of a recipe), `exit_code`.
May import every package of flowrl.
"""

import sys
from types import TracebackType


def _report_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints one line instead of a traceback if Ctrl-C interrupts the imports of a program, which take seconds."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _report_interrupt  # before the imports below

from flowrl.cli.main import exit_code, main, run_recipe  # noqa: E402 (see above)

__all__ = ["exit_code", "main", "run_recipe"]
