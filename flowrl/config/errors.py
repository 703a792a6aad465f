"""The root of every error that is the user's to mend."""


class UserError(ValueError):
    """What a user set or gave cannot be done. One sentence: what, where, what is allowed, the fix.

    Programs turn it into that sentence on stderr and exit code 2 (`flowrl.cli.exit_code`); any other exception is a
    defect and keeps its traceback.
    """
