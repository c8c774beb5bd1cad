"""Errors a user can act on.

Anything that is the caller's to fix is a `GraftError`; everything else is a bug and keeps its traceback.
"""


class GraftError(ValueError):
    """Its message is one line: what is wrong, and what to do about it."""


class ModelError(GraftError):
    """A model cannot be found, fetched or read."""


class ContextError(GraftError):
    """A prompt and its answer do not fit the model's context."""
