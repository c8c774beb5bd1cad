"""Silence for transformers: no progress bars and log messages while Graft shows its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_TALKATIVE = "bitsandbytes.autograd._functions"  # logs a line for every layer of every step


class _Once(logging.Filter):
    """Lets each message of a logger pass once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_new = record.getMessage() not in self._said
        self._said.add(record.getMessage())
        return is_new


def say_once() -> None:
    """Let libraries that repeat a message in every step say it once."""
    logger = logging.getLogger(_TALKATIVE)
    if not any(isinstance(each, _Once) for each in logger.filters):
        logger.addFilter(_Once())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Log errors alone and show no bars; afterwards the caller's settings are restored."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
