"""The root of every error that is the user's to mend, and that of a run's own checks."""


class UserError(ValueError):
    """What a user set or gave cannot be done. One sentence: what, where, what is allowed, the fix.

    Programs turn it into that sentence on stderr and exit code 2 (`flowrl.cli.exit_code`); any other exception is a
    defect and keeps its traceback.
    """


class CheckFailed(RuntimeError):
    """What a run computes would be wrong, as one of its own checks has found. One sentence, with the likely causes.

    Programs turn it into that sentence on stderr and the exit code of a run that failed, 1.
    """
