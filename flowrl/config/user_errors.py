"""Base class of all user errors, and the error of a run's own correctness checks."""


class UserError(ValueError):
    """Raised for an invalid setting or input file. The message is one sentence: what, where, what is allowed, how to
    fix it.

    Programs print the message to stderr and exit with code 2 (`flowrl.cli.exit_code`). Any other exception is a bug and
    keeps its traceback.
    """


class CheckFailed(RuntimeError):
    """Raised if a correctness check of a running job fails. The message is one sentence with the likely causes.

    Programs print the message to stderr and exit with code 1.
    """
