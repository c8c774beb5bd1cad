"""Errors that a user can act on.

An error that the caller can fix is a `GraftError`; any other error is a bug and keeps its traceback.
"""


class GraftError(ValueError):
    """An error that the caller can fix. Its message is one line: what is wrong, and what to do about it."""


class ModelError(GraftError):
    """A model cannot be found, fetched or read."""


class ContextError(GraftError):
    """A prompt and its answer do not fit the model's context."""
