"""`UserError`: what a user can cause and mend."""

from __future__ import annotations


class UserError(Exception):
    """Base of errors whose message is the whole story: the value, what was expected, what to do.

    The mains print it as one paragraph. Any other exception is a fault of the program and keeps its
    traceback.
    """
