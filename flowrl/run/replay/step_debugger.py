"""Stops a replayed step in Python's debugger: at the start of the step, at functions, or at an exception."""

import inspect
import pdb
from bdb import BdbQuit
from collections.abc import Sequence
from functools import reduce
from types import FrameType, TracebackType
from typing import Any

from flowrl.config import ImportNameError, UserError
from flowrl.config.base import import_attribute


class StepDebugger:
    """Runs `pdb` in a replayed step."""

    def __init__(self, functions: Sequence[str], *, stops_at_start: bool) -> None:
        """Sets the breakpoints. Raises UserError if a function cannot be imported or has no Python source.

        Args:
            functions: functions at whose first line the debugger stops, as `module:function`.
            stops_at_start: whether the debugger stops before the first line of the loop body.
        """
        self._debugger = pdb.Pdb(nosigint=True)
        for name in functions:
            function = inspect.unwrap(_import_function(name))
            code = getattr(function, "__code__", None)
            if code is None:
                raise UserError(f"--break {name} is not a Python function: name a function, as module:function")
            # The breakpoint is in the first line of code after the signature, because the arguments are defined there.
            lines = [line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno]
            problem = self._debugger.set_break(code.co_filename, min(lines, default=code.co_firstlineno))
            if problem:
                raise UserError(f"--break {name}: {problem}")
        if not stops_at_start:
            self._debugger.rcLines.append("continue")

    def start(self, frame: FrameType) -> None:
        """Stops at the next line of `frame`, or, without `stops_at_start`, when one of the functions is called."""
        self._debugger.set_trace(frame)

    def inspect_error(self, error: BaseException) -> None:
        """Opens the debugger in the frame that raised the original exception of an error."""
        cause, trace = first_cause(error)
        self._debugger.message(f"{type(cause).__name__}: {cause}")
        self._debugger.rcLines.clear()
        self._debugger.reset()
        self._debugger.interaction(None, trace)


def _import_function(name: str) -> Any:  # Any: checked by the caller
    """Returns the function `module:function` or method `module:Class.method`. Raises UserError if it is missing."""
    module, _, path = name.partition(":")
    first, *attributes = path.split(".")
    try:
        return reduce(getattr, attributes, import_attribute(f"{module}:{first}"))
    except (ImportNameError, AttributeError) as error:
        raise UserError(f"--break {name}: {error}") from error


def first_cause(error: BaseException) -> tuple[BaseException, TracebackType | None]:
    """Returns the first exception in the chain of `error`, such as the cause of a worker error, and its traceback."""
    while error.__context__ is not None:
        error = error.__context__
    return error, error.__traceback__


def is_quit(error: BaseException) -> bool:
    """Returns whether the user has quit the debugger, in the recipe or in a worker."""
    return isinstance(first_cause(error)[0], BdbQuit)
