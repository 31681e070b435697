"""Mistakes that a user can mend, as one sentence instead of a traceback."""


class UserError(Exception):
    """What is wrong and what to do about it, in one sentence. The program ends with status 2."""
