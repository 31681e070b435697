"""Mistakes that a user can mend, as one sentence instead of a traceback."""

BAD_USAGE = 2  # the program's status then


class UserError(Exception):
    """What is wrong and what to do about it, in one sentence. The program ends with BAD_USAGE."""


def first_few(names: list[str]) -> str:
    """The first of `names`, and how many more there are."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
