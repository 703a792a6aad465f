"""Base classes of errors that programs print without a traceback."""


class UserError(ValueError):
    """Raised if a setting or an input file is invalid.

    The message names the invalid value, its location, the allowed values and the fix. Programs print the message to
    stderr and exit with code 2 (`flowrl.cli.exit_code`).
    """


class CheckFailed(RuntimeError):
    """Raised if a correctness check of a running job fails. The message lists the likely causes.

    Programs print the message to stderr and exit with code 1.
    """
