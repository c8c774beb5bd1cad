"""Failures of Graft's own code, which must never cost an answer, and log lines that an operator needs only once."""

import logging
from types import TracebackType

_log = logging.getLogger("graft.sglang")
_told: set[str] = set()


def say_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        _log.warning("Graft: %s", message)


class Attempt:
    """A `with` block whose failure is logged, once for each purpose, and ends nothing but the block."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self.failed = False

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.failed = isinstance(error, Exception)
        if self.failed and self._purpose not in _told:
            _told.add(self._purpose)
            _log.error("Graft could not %s; SGLang continues without it", self._purpose, exc_info=error)
        return self.failed
