"""The server's log: lines of text or of JSON on stderr, and one line for every request that is refused or fails."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

log = logging.getLogger("graft.server")


class JsonLines(logging.Formatter):
    """A JSON object for each record: time, level, message, and the fields that the record carries."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_config(log_format: LogFormat) -> dict[str, Any]:
    """The logging of the server and of uvicorn, for `logging.config.dictConfig`."""
    text = {"format": "%(asctime)s %(levelname)s %(message)s"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": JsonLines} if log_format == "json" else text},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "loggers": {name: {"handlers": ["stderr"], "level": "INFO"} for name in ("uvicorn", "graft.server")},
    }


def log_request(request_id: str, key: str | None, status: int, words: str, **fields: Any) -> None:
    """One line about a request. It holds nothing that the client wrote, except its own request id.

    key: the name of its API key. fields: what a line of JSON has besides.
    """
    level = logging.WARNING if status >= 500 else logging.INFO
    named = {"request_id": request_id, "key": key, "status": status, **fields}
    log.log(level, "%s %s %d %s", request_id, key or "-", status, words, extra={"fields": named})
