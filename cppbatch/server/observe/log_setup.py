"""Sets up the server's log as text or JSON: one line per request; every line names its request."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any, Literal

from cppbatch.errors import ConfigError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error", "off"]

_OFF = logging.CRITICAL + 1

access_log = logging.getLogger("cppbatch.access")

current_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
"""The id of the current request."""


def set_up(
    log_format: LogFormat,
    *,
    verbose: bool = False,
    level: LogLevel | None = None,
    access: bool = True,
    file: Path | None = None,
) -> None:
    """Logs requests, batch progress, starts and stops of workers and replicas, and warnings to stderr; with `verbose`,
    everything.

    `level`: the minimum level of all lines, instead; off: no lines. `access`: whether to log requests. `file`: gets the
    lines too, at its end. Raises `ConfigError` if it cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file:
        try:
            handlers.append(logging.FileHandler(file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--log-file {file} cannot be written: {error.strerror}") from error
    for handler in handlers:
        handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
        handler.addFilter(_with_request_id)
    general = "debug" if verbose else level or "warning"
    logging.basicConfig(handlers=handlers, level=_OFF if general == "off" else general.upper(), force=True)
    shown = ("cppbatch.jobs", "cppbatch.flags", "cppbatch.scaling", "cppbatch.models", "cppbatch.ray")
    for logger in (access_log, *map(logging.getLogger, shown)):
        logger.setLevel("INFO" if level is None and not verbose else logging.NOTSET)
    access_log.disabled = not access
    logging.getLogger("aiohttp.server").addFilter(_shorten_http_errors)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # without tab and newline


class TextFormatter(logging.Formatter):
    """`2026-03-01 12:03:41.512 WARNING cppbatch.server: message [request id]`."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        record.about = f" [{request_id}]" if request_id else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Escapes texts from model files, which can neither start a line of their own nor control a terminal."""
        record.message = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.message).replace("\n", "\n    ")
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII, so no text can contain a line break


def _with_request_id(record: logging.LogRecord) -> bool:
    record.request_id = current_id.get()
    return True


def _shorten_http_errors(record: logging.LogRecord) -> bool:
    """Reduces aiohttp's tracebacks about malformed HTTP, which is the client's error, to a one-line warning."""
    from aiohttp.http_exceptions import HttpProcessingError  # already imported by the code that logs this

    if record.exc_info and isinstance(error := record.exc_info[1], HttpProcessingError):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "refused a request that is not valid HTTP (%s)"
        record.args = (type(error).__name__,)  # not its message, which quotes bytes that may be part of a key
        record.exc_info = None
    return True
