"""Base classes of errors that programs print without a traceback, and the conversion of users' exceptions to them."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType


class UserError(ValueError):
    """Raised if a setting or an input file is invalid.

    The message names the invalid value, its location, the allowed values and the fix. Programs print the message to
    stderr and exit with code 2 (`flowrl.cli.exit_code`).
    """


class CheckFailed(RuntimeError):
    """Raised if a correctness check of a running job fails. The message lists the likely causes.

    Programs print the message to stderr and exit with code 1.
    """


@contextmanager
def convert_errors(
    convert: Callable[[BaseException], Exception],
    kinds: type[BaseException] = Exception,
    *,
    keep: type[Exception] | tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Runs a block that executes code of a user or of a library, which may raise anything. Raises `convert(error)`.

    Args:
        convert: returns the error to raise, whose `__cause__` is the original exception.
        kinds: class of the converted exceptions. By default, SystemExit, KeyboardInterrupt and CancelledError pass.
            BaseException converts these too, for a process that only runs code of users.
        keep: classes of exceptions that also pass.
    """
    try:
        yield
    except keep:
        raise
    except kinds as error:
        raise convert(error) from error


def describe_exception(error: BaseException, owner: str) -> str:
    """Returns `OWNER raised CLASS: TEXT (FILE, line N)`, with the innermost line of the code of `owner`."""
    frames = traceback.extract_tb(_frames_of_block(error.__traceback__))
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{owner} raised {error_text(error)}{location}"


def _frames_of_block(frames: TracebackType | None) -> TracebackType | None:
    """Returns the traceback below the block of `convert_errors`. None if the block raised the exception itself, for
    example by a call with wrong arguments.
    """
    if frames is None or frames.tb_frame.f_code.co_filename != __file__ or frames.tb_next is None:
        return frames
    return frames.tb_next.tb_next


def error_text(error: BaseException) -> str:
    """Returns `CLASS: TEXT`."""
    return f"{type(error).__name__}: {describe_safely(lambda: str(error))}"


def describe_safely(describe: Callable[[], str]) -> str:
    """Returns a text about an object of the user, whose methods may raise an exception."""
    try:
        return describe()
    except Exception as error:  # noqa: BLE001 - any exception only replaces the text
        return f"<no text: {type(error).__name__}>"
