"""Logs: one line per change of state, as text for people or JSON for machines.

Fields ride in ``extra``: ``log.info("worker joined", extra={"worker": "worker-0", "pid": 17})``. Control characters are
escaped, so that nothing that came over a socket can forge a line or move a cursor. Inputs and keys are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Protocol

from packhorse_shared.settings import ProcessSettings

_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message", "taskName"}
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def escape(text: str) -> str:
    """Text with every control character, line separators included, written as an escape; lone surrogates replaced."""
    return text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode("utf-8")


class _Formatter(logging.Formatter):
    """What both formats share: the process's own name, the time in UTC, and the fields of ``extra``."""

    converter = staticmethod(time.gmtime)

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def _time(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z"

    @staticmethod
    def _fields(record: logging.LogRecord) -> dict[str, Any]:
        return {name: value for name, value in record.__dict__.items() if name not in _STANDARD_FIELDS}


class TextFormatter(_Formatter):
    """``2026-01-31T12:00:00.000Z INFO broker worker joined worker=worker-0 pid=17``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on lines of its own."""
        fields = "".join(f" {name}={escape(str(value))}" for name, value in self._fields(record).items())
        line = f"{self._time(record)} {record.levelname} {self._process_name} {escape(record.getMessage())}{fields}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n    {escape(each)}" for each in trace.splitlines())
        return line


class JsonFormatter(_Formatter):
    """One JSON object a line: time, level, process, message and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, tracebacks included."""
        line: dict[str, Any] = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "message": record.getMessage(),
        }
        line |= self._fields(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextSink(Protocol):
    """Where lines go: a text stream, as far as logging needs one."""

    def write(self, text: str, /) -> object:
        """Take a text."""

    def flush(self) -> object:
        """Hold nothing back."""


def configure_logs(settings: ProcessSettings, process_name: str, sink: TextSink | None = None) -> None:
    """Send this process's logs to stderr, which supervisord keeps in rotating files, or to ``sink``."""
    handler = logging.StreamHandler[Any](sys.stderr if sink is None else sink)
    handler.setFormatter(JsonFormatter(process_name) if settings.log_format == "json" else TextFormatter(process_name))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
